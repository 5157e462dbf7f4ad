// Forward: online softmax over the key tiles that a tile of queries visits. Queries lie along the lanes, so the running
// maximum and sum are vectors and no reduction across lanes exists.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "distance.h"
#include "dropout.h"
#include "gemm.h"
#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// lse = maximum + log(sum), and what that sum loses in rounding.
template <class R>
static inline void write_lse(const Forward& f, int64_t at, R top, R sum) {
  const R log_sum = R(__builtin_log(double(sum))), lse = top + log_sum;
  static_cast<R*>(f.lse)[at] = sum == 0 ? -kInf<R> : lse;
  static_cast<R*>(f.lse_low)[at] = sum == 0 ? R(0) : (top - lse) + log_sum;
}

// Writes out / sum, and lse.
template <class R>
static inline void finish_row(const Problem& p, const Forward& f, int64_t at, R* x, R top, R sum) {
  const R inverse = R(1) / sum;
  for (int64_t h = 0; h < p.H; ++h) x[h] = sum == 0 ? R(0) : x[h] * inverse;
  write_row(f.out, f.out_type, at * p.H, x, p.H);
  write_lse(f, at, top, sum);
}

template <class R, int NV>
struct ForwardTile {
  static constexpr int L = Simd<R>::lanes, PANEL = NV * L;
  const Problem* p;
  Masker<R, PANEL> masker;
  KeyCache<R> cache;
  R *rows, *q, *out, *s;  // rows [kLanes][width]; q, out [panel][H][PANEL]; s [kKeys][PANEL]
  R *top, *sum;           // running maximum and sum of a lane
  int64_t* cached;        // 1 + the (batch row, kv head) in the cache, which outlives a task
  int64_t width, keys;
  DropoutLanes drop;
  SlopeLanes<R> slopes;

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    cached = arena.take<int64_t>(1);  // at the very beginning, which is zero at first: see Runner
    width = (problem.H + L - 1) / L * L;
    keys = keys_per_tile(problem);
    masker.take(arena, problem);
    cache.take(arena, problem, width, keys, Tiling(problem).per_head > 1);
    rows = arena.take<R>(kLanes * width);
    q = arena.take<R>(kLanes * problem.H);
    out = arena.take<R>(kLanes * problem.H);
    s = arena.take<R>(keys * PANEL);
    top = arena.take<R>(kLanes);
    sum = arena.take<R>(kLanes);
  }

  void open_cache(int64_t b, int64_t head) {
    const int64_t wanted = 1 + b * p->K + head;
    if (*cached != wanted) cache.clear();
    *cached = wanted;
  }

  // Keys [from, to) of what the tile visits; the sink joins the softmax if `with_sink`.
  void run(const QueryTile& tile, const Forward& f, int64_t from, int64_t to, bool with_sink) {
    begin(tile, with_sink);
    Pieces pieces(*p, tile, keys, from, to);
    Piece now, next;
    for (bool some = pieces.next(now); some; now = next) {
      some = pieces.next(next);
      if (!masker.read(now)) continue;
      const int64_t steps = tile_panels(tile) * (now.count + p->H) / kMicroRows;
      visit_keys(tile, now, some ? cache.ahead(tile.b, kv_head(tile), next, steps) : ahead_of(tile, f, steps));
    }
  }

  void begin(const QueryTile& tile, bool with_sink) {
    masker.begin(tile);
    read_queries(rows, width, *p, p->q, tile, R(p->scale));
    to_panels<R, PANEL>(q, rows, width, p->H, tile.lanes());
    __builtin_memset(out, 0, sizeof(R) * size_t(tile_panels(tile) * PANEL * p->H));
    for (int i = 0; i < kLanes; ++i) {
      const bool sink = with_sink && p->sinks && i < tile.lanes();
      top[i] = sink ? static_cast<const R*>(p->sinks)[tile.head(i)] : -kInf<R>;
      sum[i] = top[i] == -kInf<R> ? 0 : 1;
    }
    if (p->dropout.on) drop.begin(*p, tile, masker.q);
    if (p->by_distance.slopes) slopes.begin(*p, tile, masker.q);
  }

  static int tile_panels(const QueryTile& tile) { return (tile.lanes() + PANEL - 1) / PANEL; }
  int64_t kv_head(const QueryTile& tile) const { return tile.n / (p->N / p->K); }

  // During a tile's last piece: the next tile's queries, and where this one's output goes.
  Ahead ahead_of(const QueryTile& tile, const Forward& f, int64_t steps) const {
    const int64_t size = size_of(p->type), at = tile.offset(*p, 0) * p->H, row = p->N * p->H;
    const int64_t rows = lesser<int64_t>(tile.rows, p->T - tile.t - tile.rows);
    const int64_t each = 1 + rows / greater<int64_t>(1, steps);
    const char* q = static_cast<const char*>(p->q) + (at + tile.rows * row) * size;
    const char* out = static_cast<const char*>(f.out) + at * size_of(f.out_type);
    return {q, out, row * size, tile.heads * p->H * size, rows, each};
  }

  void visit_keys(const QueryTile& tile, const Piece& piece, Ahead ahead) {
    const TileMask<PANEL>& m = masker.mask;
    const R *k, *v;
    cache.get(k, v, tile.b, kv_head(tile), piece, m.kind == kIsPartial, m.seen);
    for (int panel = 0; panel < tile_panels(tile); ++panel) attend(panel, k, v, ahead);
  }

  // One panel's queries and the keys of the tile that it sees.
  void attend(int panel, const R* k, const R* v, Ahead& ahead) {
    const TileMask<PANEL>& m = masker.mask;
    const int first = m.first[panel], count = m.last[panel] - first;
    if (count <= 0) return;
    alignas(64) R alpha[PANEL];
    gemm<R, NV, false, kStore>(count, p->H, k + first * width, width, q + panel * p->H * PANEL, PANEL, s, PANEL,
                               nullptr, ahead);
    weigh(panel, first, count, alpha);
    gemm<R, NV, true, kScaleAdd>(p->H, count, v + first * width, width, s, PANEL, out + panel * p->H * PANEL, PANEL,
                                 alpha, ahead);
  }

  // Products of queries and keys, in `s`, become weights.
  void weigh(int panel, int first, int count, R* alpha) {
    if (p->soft_cap != 0) soften(count);
    if (p->has_bias) add_bias(panel, first, count);
    if (p->by_distance.slopes) slopes.add(s, PANEL, NV, panel * PANEL, masker.kv.pos + first, count);
    if (masker.mask.exact[panel])
      softmax<false>(panel, first, count, alpha);
    else
      softmax<true>(panel, first, count, alpha);
    if (p->dropout.on) drop_some(panel, first, count);
  }

  void soften(int count) {
    const R cap = R(p->soft_cap), inverse = R(1 / p->soft_cap);
    for (int i = 0; i < count * PANEL; i += L) store(s + i, cap * vtanh(load(s + i) * inverse));
  }

  void add_bias(int panel, int first, int count) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const Vec<R> b = load(masker.bias + (first + i) * kLanes + panel * PANEL + j);
        store(s + i * PANEL + j, load(s + i * PANEL + j) + b);
      }
  }

  // Scores in `s` become exp(score - maximum); alpha is what older sums must be multiplied with.
  template <bool MASKED>
  __attribute__((noinline)) void softmax(int panel, int first, int count, R* alpha) {
    const int lane = panel * PANEL;
    Vec<R> high[NV], base[NV], total[NV];
    for (int j = 0; j < NV; ++j) high[j] = load(top + lane + j * L);
    mask_and_maximum<MASKED>(lane, first, count, high);
    for (int j = 0; j < NV; ++j) {
      const Vec<R> old = load(top + lane + j * L);
      // A lane that has seen no key yet: (-inf) - (-inf) would be NaN.
      base[j] = high[j] == -kInf<R> ? splat(R(0)) : high[j];
      total[j] = Vec<R>{};
      store(alpha + j * L, vexp(old - base[j]));
      store(top + lane + j * L, high[j]);
    }
    int i = 0;
    for (; i + 2 <= count; i += 2) exponentiate<2>(s + i * PANEL, base, total);
    for (; i < count; ++i) exponentiate<1>(s + i * PANEL, base, total);
    for (int j = 0; j < NV; ++j) store(sum + lane + j * L, load(sum + lane + j * L) * load(alpha + j * L) + total[j]);
  }

  template <bool MASKED>
  inline __attribute__((always_inline)) void mask_and_maximum(int lane, int first, int count, Vec<R>* high) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < NV; ++j) {
        Vec<R> x = load(s + i * PANEL + j * L);
        if (MASKED) {
          x = lanes_of<R>(masker.mask.bytes[first + i] + lane + j * L) ? x : splat(-kInf<R>);
          store(s + i * PANEL + j * L, x);
        }
        high[j] = x > high[j] ? x : high[j];
      }
  }

  template <int KEYS>
  static inline __attribute__((always_inline)) void exponentiate(R* scores, const Vec<R>* base, Vec<R>* total) {
    Vec<R> x[KEYS * NV];
    for (int i = 0; i < KEYS * NV; ++i) x[i] = load(scores + i * L) - base[i % NV];
    exp_each<KEYS * NV>(x);
    for (int i = 0; i < KEYS * NV; ++i) {
      total[i % NV] += x[i];
      store(scores + i * L, x[i]);
    }
  }

  void drop_some(int panel, int first, int count) {
    const R factor = R(p->dropout.inverse_keep);
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const auto keep = drop.template keep<R>(panel * PANEL + j, masker.kv.pos[first + i]);
        store(s + i * PANEL + j, keep ? load(s + i * PANEL + j) * factor : splat(R(0)));
      }
  }

  // Writes out / sum, and lse.
  void finish(const QueryTile& tile, const Forward& f) {
    from_panels<R, PANEL>(rows, out, sum, width, p->H, tile.lanes());
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      const int64_t at = tile.offset(*p, lane);
      write_row(f.out, f.out_type, at * p->H, rows + lane * width, p->H);
      write_lse(f, at, top[lane], sum[lane]);
    }
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
