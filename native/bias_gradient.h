// The gradient of the bias, in a separate pass over the same tiles. Every task owns a part of the bias and sums the
// gradients of that part in a fixed order, so no T x S array is needed unless the bias has that size. If the bias has
// no query axis, chunks of queries write partial sums of its shape, which are added in order.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "backward.h"
#include "isa.h"
#include "problem.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

template <class R>
struct BiasGradientJob {
  const Problem* p;
  const BiasGradient* g;
  Tiling tiling;
  int64_t size;    // elements of the bias
  int64_t pieces;  // tasks per (batch, head) of the bias

  BiasGradientJob(const Problem& problem, const BiasGradient& gradient) : p(&problem), g(&gradient), tiling(problem) {
    size = g->dims[0] * g->dims[1] * g->dims[2] * g->dims[3];
    pieces = by_chunks() ? g->chunks : tiling.per_head;
  }
  bool by_chunks() const { return g->dims[2] == 1 && p->T > 1; }
  static void task(void* self, int64_t i, void* scratch) { static_cast<BiasGradientJob*>(self)->compute(i, scratch); }

  void compute(int64_t i, void* scratch) {
    const int64_t piece = i % pieces, bn = i / pieces % g->dims[1], bb = i / pieces / g->dims[1];
    BackwardTile<R> work;
    Arena arena = {static_cast<char*>(scratch)};
    work.take(arena, *p);
    R* out = static_cast<R*>(by_chunks() ? g->scratch : g->dbias) + (by_chunks() ? piece * size : 0);
    const int64_t from = by_chunks() ? tiling.per_head * piece / pieces : piece;
    const int64_t to = by_chunks() ? tiling.per_head * (piece + 1) / pieces : piece + 1;
    for (int64_t b = g->dims[0] == 1 ? 0 : bb; b < (g->dims[0] == 1 ? p->B : bb + 1); ++b)
      for (int64_t n = g->dims[1] == 1 ? 0 : bn; n < (g->dims[1] == 1 ? p->N : bn + 1); ++n)
        for (int64_t j = from; j < to; ++j) {
          QueryTile tile;
          if (!tiling.at(*p, b, n / tiling.heads, j, tile)) continue;
          work.cache.clear();  // another head
          tile.n = n;          // one head at a time: other heads of a tile may belong to another part of the bias
          tile.heads = 1;
          add_tile(work, tile, out);
        }
  }

  void add_tile(BackwardTile<R>& work, const QueryTile& tile, R* out) {
    constexpr int PANEL = BackwardTile<R>::PANEL;
    work.begin(tile, *g);
    Pieces pieces(*p, tile, work.keys, 0, p->S);
    for (Piece piece; pieces.next(piece);) {
      if (!work.masker.read(piece)) continue;
      work.read_keys(tile, piece);
      const TileMask<PANEL>& m = work.masker.mask;
      for (int panel = 0; panel * PANEL < tile.lanes(); ++panel)
        if (m.first[panel] < m.last[panel]) {
          work.scores(panel);
          add_panel(work, tile, panel, piece.first, out);
        }
    }
  }

  void add_panel(const BackwardTile<R>& work, const QueryTile& tile, int panel, int64_t s0, R* out) {
    constexpr int PANEL = BackwardTile<R>::PANEL;
    const TileMask<PANEL>& m = work.masker.mask;
    const int64_t bb = g->dims[0] == 1 ? 0 : tile.b, bn = g->dims[1] == 1 ? 0 : tile.n;
    const int64_t t_stride = g->dims[2] == 1 ? 0 : g->dims[3], s_stride = g->dims[3] == 1 ? 0 : 1;
    R* base = out + (bb * g->dims[1] + bn) * g->dims[2] * g->dims[3];
    for (int lane = panel * PANEL; lane < lesser(tile.lanes(), (panel + 1) * PANEL); ++lane) {
      if (g->of_table) {
        for (int s = m.first[panel]; s < m.last[panel]; ++s)
          base[work.masker.table_place(lane, s)] += work.ds[s * kLanes + lane];
        continue;
      }
      R* row = base + tile.row(lane) * t_stride + s0 * s_stride;
      for (int s = m.first[panel]; s < m.last[panel]; ++s) row[s * s_stride] += work.ds[s * kLanes + lane];
    }
  }

  bool run(Runner& runner) {
    __builtin_memset(g->dbias, 0, sizeof(R) * size_t(size));
    if (by_chunks()) __builtin_memset(g->scratch, 0, sizeof(R) * size_t(size * g->chunks));
    Arena arena = {nullptr};
    BackwardTile<R> measure;
    measure.take(arena, *p);
    if (!runner.run(g->dims[0] * g->dims[1] * pieces, task, this, arena.used)) return false;
    if (by_chunks())
      for (int64_t c = 0; c < g->chunks; ++c) {
        R* __restrict out = static_cast<R*>(g->dbias);
        const R* __restrict x = static_cast<const R*>(g->scratch) + c * size;
        for (int64_t i = 0; i < size; ++i) out[i] += x[i];
      }
    return true;
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
