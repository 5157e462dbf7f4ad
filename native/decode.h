// Decoding: few queries and all keys, limited by memory bandwidth. Key and value rows are read once, in memory order,
// all kv heads of a slot at a time, which the hardware prefetcher follows; head by head, every row would be on another
// page. In stacks with heads first, the rows of one head are in memory order, so they are read head by head. With so
// few queries the products run along the elements of a head, directly on the rows in memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "softmax.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// sums[row][lane] = q[lane] . k[row], for as many rows as a vector has lanes.
template <class R, int LANES>
static inline __attribute__((always_inline)) void dot_rows(R* sums_of, int64_t stride, const R* q, int64_t width,
                                                           const R* const* k, int64_t at) {
  constexpr int L = Simd<R>::lanes, ROWS = L / LANES;
  Vec<R> acc[L];
  for (int i = 0; i < L; ++i) acc[i] = Vec<R>{};
  for (int64_t h = 0; h < width; h += L) {
    Vec<R> x[LANES];
    for (int j = 0; j < LANES; ++j) x[j] = load(q + j * width + h);
    for (int i = 0; i < ROWS; ++i) {
      const Vec<R> y = loose(k[i] + at + h);
      for (int j = 0; j < LANES; ++j) acc[i * LANES + j] += x[j] * y;
    }
  }
  alignas(64) R all[L];
  store(all, sums<R>(acc));
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < LANES; ++j) sums_of[i * stride + j] = all[i * LANES + j];
}

// out[lane] += sum over rows of weights[row][lane] * v[row], for NV vectors of a row.
template <class R, int LANES, int NV>
static inline __attribute__((always_inline)) void add_vectors(R* __restrict out, int64_t width, const R* weights,
                                                              int64_t stride, const R* const* v, int64_t at, int rows) {
  constexpr int L = Simd<R>::lanes;
  Vec<R> acc[LANES][NV];
  for (int j = 0; j < LANES; ++j)
    for (int n = 0; n < NV; ++n) acc[j][n] = load(out + j * width + n * L);
  for (int i = 0; i < rows; ++i) {
    Vec<R> x[NV];
    for (int n = 0; n < NV; ++n) x[n] = loose(v[i] + at + n * L);
    for (int j = 0; j < LANES; ++j) {
      const Vec<R> w = splat(weights[i * stride + j]);
      for (int n = 0; n < NV; ++n) acc[j][n] += w * x[n];
    }
  }
  for (int j = 0; j < LANES; ++j)
    for (int n = 0; n < NV; ++n) store(out + j * width + n * L, acc[j][n]);
}

template <class R, int LANES>
static inline void add_weighted(R* out, int64_t width, const R* weights, int64_t stride, const R* const* v, int64_t at,
                                int rows) {
  constexpr int L = Simd<R>::lanes;
  int64_t h = 0;
  for (; h + 2 * L <= width; h += 2 * L) add_vectors<R, LANES, 2>(out + h, width, weights, stride, v, at + h, rows);
  for (; h < width; h += L) add_vectors<R, LANES, 1>(out + h, width, weights, stride, v, at + h, rows);
}

// The heads of one task. With a bias it is one kv head, because a bias may mask a key, whose row must not be read, for
// one kv head only. It is also one if the rows of a slot's kv heads are not neighbours.
struct Heads {
  int64_t share, kv_heads, blocks;  // query heads per kv head; kv heads per block; blocks

  explicit Heads(const Problem& p) : share(p.N / p.K) {
    kv_heads = p.has_bias || p.head_step > 1 ? 1 : greater<int64_t>(1, lesser<int64_t>(p.K, kLanes / (share * p.T)));
    blocks = (p.K + kv_heads - 1) / kv_heads;
  }
  QueryTile tile(const Problem& p, int64_t b, int64_t block) const {
    const int64_t n = block * kv_heads * share;
    return {b, n, 0, int(lesser(p.N - n, kv_heads * share)), int(p.T), 0};
  }
};

template <class R, int NV>
struct Stream {
  static constexpr int L = Simd<R>::lanes, PANEL = NV * L, kRows = 16, kMost = L < 4 ? L : 4;
  Softmax<R, NV> softmax;
  const Problem* p;
  int64_t width, v_width, keys;
  R *q, *out;         // [lane][width, v_width]
  R* s;               // [panel][keys + kRows][PANEL]
  R *copies, *zeros;  // [kRows][kv head][width]; [kv head][width], in place of a row that no query sees
  QueryTile tile;     // the masker keeps its address
  const R* rows[kRows];

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    softmax.take(arena, problem);
    width = padded_width<R>(p->H);
    v_width = padded_width<R>(p->Hv);
    keys = keys_per_tile(problem);
    const int64_t wide = p->K * greater(width, v_width);
    q = arena.take<R>(kLanes * width);
    out = arena.take<R>(kLanes * v_width);
    s = arena.take<R>((keys + kRows) * kLanes);
    copies = arena.take<R>(kRows * wide);
    zeros = arena.take<R>(wide);
  }

  int panels() const { return (tile.lanes() + PANEL - 1) / PANEL; }
  R* scores(int key, int lane) { return s + (lane / PANEL * (keys + kRows) + key) * PANEL + lane % PANEL; }

  // Computes the keys [from, to) for a block of heads of one batch row.
  void run(const Heads& heads, int64_t b, int64_t block, int64_t from, int64_t to) {
    tile = heads.tile(*p, b, block);
    softmax.begin(tile);
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      R* row = q + lane * width;
      read_row(row, p->q, p->type, tile.offset(*p, lane) * p->H, p->H);
      for (int64_t h = 0; h < width; ++h) row[h] = h < p->H ? row[h] * R(p->scale) : R(0);
    }
    __builtin_memset(out, 0, sizeof(R) * size_t(tile.lanes() * v_width));
    __builtin_memset(s, 0, sizeof(R) * size_t((keys + kRows) * panels() * PANEL));
    __builtin_memset(zeros, 0, sizeof(R) * size_t(p->K * greater(width, v_width)));
    Pieces pieces(*p, tile, keys, from, to);
    for (Piece piece; pieces.next(piece);)
      if (softmax.masker.read(piece)) visit_keys(heads, piece);
  }

  void visit_keys(const Heads& heads, const Piece& piece) {
    const TileMask<PANEL>& m = softmax.masker.mask;
    const int share = int(heads.share * p->T);
    for (int key = m.lo; key < m.hi; key += kRows) {
      const int64_t step = find_rows(piece, key, p->k, p->H, width);
      for (int lane = 0; lane < tile.lanes(); lane += share) score(key, lane, lane + share, lane / share * step);
    }
    for (int panel = 0; panel < panels(); ++panel) weigh(panel);
    for (int key = m.lo; key < m.hi; key += kRows) {
      const int64_t step = find_rows(piece, key, p->v, p->Hv, v_width);
      for (int lane = 0; lane < tile.lanes(); lane += share) add(key, lane, lane + share, lane / share * step);
    }
  }

  // Points `rows` to the keys or values of the next slots, for all kv heads of the block. Returns the step from one kv
  // head to the next.
  int64_t find_rows(const Piece& piece, int key, const void* data, int64_t size, int64_t padded) {
    constexpr Type same = sizeof(R) == 4 ? F32 : F64;
    const TileMask<PANEL>& m = softmax.masker.mask;
    const int64_t share = p->N / p->K, first = tile.n / share, heads = tile.heads / share;
    const bool in_place = p->type == same && size % L == 0;
    for (int i = 0; i < kRows; ++i) {
      rows[i] = zeros;
      if (key + i >= m.hi || !m.seen[key + i]) continue;
      const int64_t at = p->kv_row(tile.b, piece.first + key + i, first) * size;
      rows[i] = in_place ? static_cast<const R*>(data) + at : copies + i * heads * padded;
      if (!in_place) convert(copies + i * heads * padded, data, at, heads, size, padded);
    }
    return in_place ? size : padded;
  }

  void convert(R* to, const void* data, int64_t at, int64_t heads, int64_t size, int64_t padded) {
    for (int64_t head = 0; head < heads; ++head, to += padded) {
      read_row(to, data, p->type, at + head * size, size);
      for (int64_t h = size; h < padded; ++h) to[h] = 0;
    }
  }

  // The number of lanes from here that are computed at once: those of one kv head within one panel.
  static int together(int lane, int end) {
    const int room = lesser(end - lane, PANEL - lane % PANEL);
    return room >= kMost ? kMost : room >= 2 ? 2 : 1;
  }

  void score(int key, int lane, int end, int64_t at) {
    for (int n; lane < end; lane += n) {
      n = together(lane, end);
      n == kMost ? score_lanes<kMost>(key, lane, at)
      : n == 2   ? score_lanes<2>(key, lane, at)
                 : score_lanes<1>(key, lane, at);
    }
  }

  template <int LANES>
  __attribute__((noinline)) void score_lanes(int key, int lane, int64_t at) {
    constexpr int ROWS = L / LANES;
    const int count = lesser(kRows, softmax.masker.mask.hi - key);
    for (int i = 0; i < count; i += ROWS)
      dot_rows<R, LANES>(scores(key + i, lane), PANEL, q + lane * width, width, rows + i, at);
  }

  // Turns scores into weights, and rescales the sums of the panel's lanes.
  void weigh(int panel) {
    const TileMask<PANEL>& m = softmax.masker.mask;
    const int first = m.first[panel], count = m.last[panel] - first, begin = panel * PANEL;
    if (count <= 0) return;
    alignas(64) R alpha[PANEL];
    softmax.weigh(scores(first, begin), panel, first, count, alpha);
    for (int lane = begin; lane < lesser(tile.lanes(), begin + PANEL); ++lane) {
      if (alpha[lane - begin] == 1) continue;
      R* row = out + lane * v_width;
      for (int64_t h = 0; h < v_width; h += L) store(row + h, load(row + h) * alpha[lane - begin]);
    }
  }

  void add(int key, int lane, int end, int64_t at) {
    for (int n; lane < end; lane += n) {
      n = together(lane, end);
      n == kMost ? add_lanes<kMost>(key, lane, at) : n == 2 ? add_lanes<2>(key, lane, at) : add_lanes<1>(key, lane, at);
    }
  }

  template <int LANES>
  __attribute__((noinline)) void add_lanes(int key, int lane, int64_t at) {
    const TileMask<PANEL>& m = softmax.masker.mask;
    const int first = greater(key, m.first[lane / PANEL]), last = lesser(key + kRows, m.last[lane / PANEL]);
    if (first < last)
      add_weighted<R, LANES>(out + lane * v_width, v_width, scores(first, lane), PANEL, rows + first - key, at,
                             last - first);
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
