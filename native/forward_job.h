// The forward pass as tasks: one per tile of queries, or several over pieces of the keys if there are few tiles, whose
// results are merged.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "decode.h"
#include "forward.h"
#include "isa.h"
#include "problem.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// Hands out tasks so that a thread stays with the head whose keys it has copied: first tasks of its own head, then of a
// head that no thread has begun, then of any head. As many calls as there are tasks get one task each.
struct ByHead {
  int64_t heads, per_head;
  int64_t* taken;  // [heads] requests for tasks of each head; then one more entry: heads begun

  int64_t take_from(int64_t head) {
    const int64_t i = __atomic_fetch_add(taken + head, 1, __ATOMIC_RELAXED);
    return i < per_head ? head * per_head + i : -1;
  }
  int64_t take(int64_t own) {
    int64_t task = own >= 0 ? take_from(own) : -1;
    for (int64_t head; task < 0 && (head = __atomic_fetch_add(taken + heads, 1, __ATOMIC_RELAXED)) < heads;)
      task = take_from(head);
    for (int64_t head = 0; task < 0 && head < heads; ++head) task = take_from(head);
    return task;
  }
};

// Whether there are few enough queries for products along the elements of a head, as in decode.h.
template <class R>
static bool can_stream(const Problem& p, const Tiling& tiling) {
  return tiling.per_head == 1 && !p.by_tiles && !p.by_head && !p.has_bits && p.N / p.K * p.T <= 2 * Simd<R>::lanes;
}

template <class R, int NV>
struct ForwardJob {
  const Problem* p;
  const Forward* f;
  Tiling tiling;
  int64_t splits, run_length;  // pieces of S; tiles along T per task
  Heads heads;
  bool streams;    // decoding: see Stream
  R* partial;      // splits > 1: [tile][split][Hv + 2][lanes]
  int64_t lanes;   // of a partial result
  ByHead by_head;  // unless it streams

  ForwardJob(const Problem& problem, const Forward& forward)
      : p(&problem), f(&forward), tiling(problem), heads(problem) {
    const int64_t tiles = p->B * tiling.groups * tiling.per_head;
    streams = can_stream<R>(*p, tiling);
    splits = tiles < 16 ? greater<int64_t>(1, lesser<int64_t>(16, p->S / 1024)) : 1;
    if (streams) splits = greater<int64_t>(1, lesser<int64_t>(p->S / 1024, 32 / (p->B * heads.blocks)));
    run_length = greater<int64_t>(1, lesser<int64_t>(8, tiles / 128));
    partial = nullptr;
    lanes = streams ? heads.tile(*p, 0, 0).lanes() : tiling.heads * tiling.rows_per_tile;
  }
  int64_t runs() const { return (tiling.per_head + run_length - 1) / run_length; }
  int64_t tasks() const { return p->B * splits * (streams ? heads.blocks : tiling.groups * runs()); }
  // The number of query tiles. Each has a partial result for every split.
  int64_t tiles() const { return p->B * (streams ? heads.blocks : tiling.groups * tiling.per_head); }
  R* part(int64_t tile, int64_t split) const { return partial + (tile * splits + split) * (p->Hv + 2) * lanes; }

  static void task(void* self, int64_t i, void* scratch) { static_cast<ForwardJob*>(self)->compute(i, scratch); }
  static void merge_task(void* self, int64_t i, void* scratch) { static_cast<ForwardJob*>(self)->merge(i, scratch); }

  void compute(int64_t i, void* scratch) {
    Arena arena = {static_cast<char*>(scratch)};
    if (streams) return compute_stream(i, arena);
    ForwardTile<R, NV> work;
    work.take(arena, *p);
    i = by_head.take(*work.cached - 1);
    const int64_t split = i % splits, run = i / splits % runs(), g = i / splits / runs() % tiling.groups;
    const int64_t b = i / splits / runs() / tiling.groups;
    work.open_cache(b, g * tiling.heads / (p->N / p->K));
    for (int64_t j = run * run_length; j < lesser(tiling.per_head, (run + 1) * run_length); ++j) {
      QueryTile tile;
      if (!tiling.at(*p, b, g, j, tile)) continue;
      work.run(tile, *f, p->S * split / splits, p->S * (split + 1) / splits);
      if (splits == 1)
        work.finish(tile, *f);
      else
        save(work, tile, part((b * tiling.groups + g) * tiling.per_head + j, split));
    }
  }

  void compute_stream(int64_t i, Arena& arena) {
    Stream<R, NV> stream;
    stream.take(arena, *p);
    const int64_t split = i % splits, block = i / splits % heads.blocks, b = i / splits / heads.blocks;
    stream.run(heads, b, block, p->S * split / splits, p->S * (split + 1) / splits);
    const QueryTile& tile = stream.tile;
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      R *x = stream.out + lane * stream.v_width, top = stream.softmax.top[lane], sum = stream.softmax.sum[lane];
      if (splits == 1)
        finish_row(*p, *f, tile.offset(*p, lane), x, with_sink(*p, tile.head(lane), top, sum));
      else
        save_row(part(i / splits, split), lane, x, 1, top, sum);
    }
  }

  void save(const ForwardTile<R, NV>& work, const QueryTile& tile, R* to) {
    constexpr int PANEL = ForwardTile<R, NV>::PANEL;
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      const R* x = work.out + lane / PANEL * p->Hv * PANEL + lane % PANEL;
      save_row(to, lane, x, PANEL, work.softmax.top[lane], work.softmax.sum[lane]);
    }
  }

  void save_row(R* to, int lane, const R* x, int64_t step, R top, R sum) {
    for (int64_t h = 0; h < p->Hv; ++h) to[h * lanes + lane] = x[h * step];
    to[p->Hv * lanes + lane] = top;
    to[(p->Hv + 1) * lanes + lane] = sum;
  }

  bool tile_at(int64_t i, QueryTile& tile) const {
    if (streams) return tile = heads.tile(*p, i / heads.blocks, i % heads.blocks), true;
    const int64_t group = i / tiling.per_head;
    return tiling.at(*p, group / tiling.groups, group % tiling.groups, i % tiling.per_head, tile);
  }

  // Adds the pieces of one tile, always in the same order.
  void merge(int64_t i, void* scratch) {
    R* row = static_cast<R*>(scratch);
    QueryTile tile;
    if (!tile_at(i, tile)) return;
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      R high = -kInf<R>, total = 0;
      for (int64_t s = 0; s < splits; ++s) {
        const R top = part(i, s)[p->Hv * lanes + lane];
        high = top > high ? top : high;
      }
      for (int64_t h = 0; h < p->Hv; ++h) row[h] = 0;
      for (int64_t s = 0; s < splits; ++s) {
        const R* x = part(i, s) + lane;
        if (x[(p->Hv + 1) * lanes] == 0) continue;
        const R factor = R(__builtin_exp(double(x[p->Hv * lanes] - high)));
        total += factor * x[(p->Hv + 1) * lanes];
        for (int64_t h = 0; h < p->Hv; ++h) row[h] += factor * x[h * lanes];
      }
      finish_row(*p, *f, tile.offset(*p, lane), row, with_sink(*p, tile.head(lane), high, total));
    }
  }

  bool run(Runner& runner) {
    Arena arena = {nullptr};
    Stream<R, NV> stream;
    ForwardTile<R, NV> tile;
    streams ? stream.take(arena, *p) : tile.take(arena, *p);
    const int64_t pairs = p->B * p->K;
    by_head = {pairs, tasks() / pairs, nullptr};
    if (!streams) by_head.taken = static_cast<int64_t*>(calloc(size_t(pairs + 1), sizeof(int64_t)));
    if (splits > 1) partial = static_cast<R*>(malloc(sizeof(R) * size_t(tiles() * splits * (p->Hv + 2) * lanes)));
    bool enough = (streams || by_head.taken) && (splits == 1 || partial);
    enough = enough && runner.run(tasks(), task, this, arena.used);
    if (splits > 1) enough = enough && runner.run(tiles(), merge_task, this, sizeof(R) * kMaxHead);
    free(by_head.taken);
    free(partial);
    return enough;
  }
};

template <class R>
static bool forward_of(const Problem& p, const Forward& f, Runner& runner) {
  const Tiling tiling(p);
  const int64_t lanes = can_stream<R>(p, tiling) ? Heads(p).tile(p, 0, 0).lanes() : tiling.heads * tiling.rows_per_tile;
  if (lanes <= Simd<R>::lanes) {
    ForwardJob<R, 1> job(p, f);
    return job.run(runner);
  }
  ForwardJob<R, 2> job(p, f);
  return job.run(runner);
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
