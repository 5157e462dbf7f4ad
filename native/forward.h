// The forward pass: an online softmax over the key tiles that a tile of queries visits. Each lane is one query.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gemm.h"
#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "softmax.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

template <class R, int NV>
struct ForwardTile {
  static constexpr int L = Simd<R>::lanes, PANEL = NV * L;
  const Problem* p;
  Softmax<R, NV> softmax;
  KeyCache<R> cache;
  R *rows, *q, *out, *s;  // rows [kLanes][width]; q [panel][H][PANEL]; out [panel][Hv][PANEL]; s [kKeys][PANEL]
  int64_t* cached;        // 1 + the (batch row, kv head) in the cache, which is kept between tasks
  int64_t keys;

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    cached = arena.take<int64_t>(1);  // first in the scratch, where Runner zeroes the memory
    keys = keys_per_tile(problem);
    softmax.take(arena, problem);
    cache.take(arena, problem, keys, Tiling(problem).per_head > 1);
    rows = arena.take<R>(kLanes * greater(cache.width, cache.v_width));
    q = arena.take<R>(kLanes * problem.H);
    out = arena.take<R>(kLanes * problem.Hv);
    s = arena.take<R>(keys * PANEL);
  }

  void open_cache(int64_t b, int64_t head) {
    const int64_t wanted = 1 + b * p->K + head;
    if (*cached != wanted) cache.clear();
    *cached = wanted;
  }

  // Computes the visited keys in [from, to).
  void run(const QueryTile& tile, const Forward& f, int64_t from, int64_t to) {
    begin(tile);
    Pieces pieces(*p, tile, keys, from, to);
    Piece now, next;
    for (bool some = pieces.next(now); some; now = next) {
      some = pieces.next(next);
      if (!softmax.masker.read(now)) continue;
      const int64_t steps = tile_panels(tile) * (now.count + p->Hv) / kMicroRows;
      visit_keys(tile, now, some ? cache.ahead(tile.b, kv_head(tile), next, steps) : ahead_of(tile, f, steps));
    }
  }

  void begin(const QueryTile& tile) {
    softmax.begin(tile);
    read_queries(rows, cache.width, *p, p->q, p->H, tile, R(p->scale));
    to_panels<R, PANEL>(q, rows, cache.width, p->H, tile.lanes());
    __builtin_memset(out, 0, sizeof(R) * size_t(tile_panels(tile) * PANEL * p->Hv));
  }

  static int tile_panels(const QueryTile& tile) { return (tile.lanes() + PANEL - 1) / PANEL; }
  int64_t kv_head(const QueryTile& tile) const { return tile.n / (p->N / p->K); }

  // During a tile's last piece, prefetches the queries of the next tile and the output rows of this one.
  Ahead ahead_of(const QueryTile& tile, const Forward& f, int64_t steps) const {
    const int64_t at = tile.offset(*p, 0), q_row = p->H * size_of(p->type), out_row = p->Hv * size_of(f.out_type);
    const int64_t rows = lesser<int64_t>(tile.rows, p->T - tile.t - tile.rows);
    const int64_t each = 1 + rows / greater<int64_t>(1, steps);
    const char* q = static_cast<const char*>(p->q) + (at + tile.rows * p->N) * q_row;
    const char* out = static_cast<const char*>(f.out) + at * out_row;
    return {{q, p->N * q_row, tile.heads * q_row}, {out, p->N * out_row, tile.heads * out_row}, rows, each};
  }

  void visit_keys(const QueryTile& tile, const Piece& piece, Ahead ahead) {
    const TileMask<PANEL>& m = softmax.masker.mask;
    const R *k, *v;
    cache.get(k, v, tile.b, kv_head(tile), piece, m.kind == kIsPartial, m.seen);
    for (int panel = 0; panel < tile_panels(tile); ++panel) attend(panel, k, v, ahead);
  }

  // The queries of one panel with the keys of the tile that they see.
  void attend(int panel, const R* k, const R* v, Ahead& ahead) {
    const TileMask<PANEL>& m = softmax.masker.mask;
    const int first = m.first[panel], count = m.last[panel] - first;
    if (count <= 0) return;
    alignas(64) R alpha[PANEL];
    gemm<R, NV, false, kStore>(count, p->H, k + first * cache.width, cache.width, q + panel * p->H * PANEL, PANEL, s,
                               PANEL, nullptr, ahead);
    softmax.weigh(s, panel, first, count, alpha);
    gemm<R, NV, true, kScaleAdd>(p->Hv, count, v + first * cache.v_width, cache.v_width, s, PANEL,
                                 out + panel * p->Hv * PANEL, PANEL, alpha, ahead);
  }

  // Writes out / sum, and lse.
  void finish(const QueryTile& tile, const Forward& f) {
    alignas(64) R divisors[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      divisors[lane] = 0;
      if (lane >= tile.lanes()) continue;
      const Total<R> total = with_sink(*p, tile.head(lane), softmax.top[lane], softmax.sum[lane]);
      divisors[lane] = total.divisor;
      write_lse(f, tile.offset(*p, lane), total);
    }
    from_panels<R, PANEL>(rows, out, divisors, cache.v_width, p->Hv, tile.lanes());
    for (int lane = 0; lane < tile.lanes(); ++lane)
      write_row(f.out, f.out_type, tile.offset(*p, lane) * p->Hv, rows + lane * cache.v_width, p->Hv);
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
