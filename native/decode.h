// Decoding: few queries, all keys, bound by memory. Key and value rows are read once, in the order in which they lie in
// memory, all kv heads of a slot together, which the hardware's prefetcher follows; head by head every row would be
// another page. With so few queries the products run along the elements of a head, straight from where the rows are.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "forward.h"
#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// Of four rows: sums[row][lane] = q[lane] . k[row].
template <class R, int LANES>
static inline void dot_rows(R* sums, int64_t stride, const R* q, int64_t width, const R* const* k) {
  constexpr int L = Simd<R>::lanes;
  const R *k0 = k[0], *k1 = k[1], *k2 = k[2], *k3 = k[3];
  Vec<R> acc[4][LANES];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < LANES; ++j) acc[i][j] = Vec<R>{};
  for (int64_t h = 0; h < width; h += L) {
    const Vec<R> x[4] = {loose(k0 + h), loose(k1 + h), loose(k2 + h), loose(k3 + h)};
    for (int j = 0; j < LANES; ++j) {
      const Vec<R> y = load(q + j * width + h);
      for (int i = 0; i < 4; ++i) acc[i][j] += x[i] * y;
    }
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < LANES; ++j) sums[i * stride + j] = sum_of<R>(acc[i][j]);
}

// out[lane] += sum over four rows of weights[row][lane] * v[row].
template <class R, int LANES>
static inline void add_weighted(R* __restrict out, int64_t width, const R* __restrict weights, int64_t stride,
                                const R* const* v) {
  constexpr int L = Simd<R>::lanes;
  const R *v0 = v[0], *v1 = v[1], *v2 = v[2], *v3 = v[3];
  Vec<R> w[4][LANES];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < LANES; ++j) w[i][j] = splat(weights[i * stride + j]);
  for (int64_t h = 0; h < width; h += L) {
    const Vec<R> x[4] = {loose(v0 + h), loose(v1 + h), loose(v2 + h), loose(v3 + h)};
    for (int j = 0; j < LANES; ++j) {
      Vec<R> y = load(out + j * width + h);
      for (int i = 0; i < 4; ++i) y += w[i][j] * x[i];
      store(out + j * width + h, y);
    }
  }
}

template <class R, int NV>
struct Stream {
  static constexpr int L = Simd<R>::lanes, PANEL = NV * L;
  ForwardTile<R, NV> work;  // masks and softmax
  const Problem* p;
  const Tiling* tiling;
  int64_t width, lanes;
  R *q, *out;         // [group][lane][width]
  R *top, *sum;       // [group][kLanes]
  R* s;               // [group][key][PANEL]
  R *copies, *zeros;  // [4][kv head][width]; [width]: what stands for a row that nobody sees
  uint8_t* seen;      // [group][kKeys]
  int *first, *last;  // of each group: the keys of the piece that it sees
  QueryTile tile;     // the masker keeps its address

  void take(Arena& arena, const Problem& problem, const Tiling& t) {
    p = &problem;
    tiling = &t;
    work.take(arena, problem);
    width = work.width;
    lanes = t.heads * t.rows_per_tile;
    q = arena.take<R>(t.groups * lanes * width);
    out = arena.take<R>(t.groups * lanes * width);
    top = arena.take<R>(t.groups * kLanes);
    sum = arena.take<R>(t.groups * kLanes);
    s = arena.take<R>(t.groups * work.keys * PANEL);
    copies = arena.take<R>(4 * problem.K * width);
    zeros = arena.take<R>(width);
    seen = arena.take<uint8_t>(t.groups * kKeys);
    first = arena.take<int>(t.groups);
    last = arena.take<int>(t.groups);
  }

  R* out_row(int64_t g, int lane) { return out + (g * lanes + lane) * width; }
  R* scores(int64_t g, int key) { return s + (g * work.keys + key) * PANEL; }

  void select(int64_t g) {
    work.top = top + g * kLanes;
    work.sum = sum + g * kLanes;
  }

  void run(int64_t b, int64_t from, int64_t to, bool with_sink) {
    for (int64_t g = 0; g < tiling->groups; ++g) {
      tiling->at(*p, b, g, 0, tile);
      select(g);
      work.begin(tile, with_sink);
      __builtin_memcpy(q + g * lanes * width, work.rows, sizeof(R) * size_t(lanes * width));
    }
    __builtin_memset(out, 0, sizeof(R) * size_t(tiling->groups * lanes * width));
    __builtin_memset(s, 0, sizeof(R) * size_t(tiling->groups * work.keys * PANEL));
    __builtin_memset(zeros, 0, sizeof(R) * size_t(width));
    tiling->at(*p, b, 0, 0, tile);
    Pieces pieces(*p, tile, work.keys, from, to);
    for (Piece piece; pieces.next(piece);) visit_keys(b, piece);
  }

  void visit_keys(int64_t b, const Piece& piece) {
    if (!look(b, piece)) return;
    each_row(b, piece, p->k, [&](int64_t g, int key, const R* const* rows) {
      const R* x = q + g * lanes * width;
      int lane = 0;
      for (; lane + 2 <= lanes; lane += 2) dot_rows<R, 2>(scores(g, key) + lane, PANEL, x + lane * width, width, rows);
      if (lane < lanes) dot_rows<R, 1>(scores(g, key) + lane, PANEL, x + lane * width, width, rows);
    });
    for (int64_t g = 0; g < tiling->groups; ++g) weigh(b, g, piece);
    each_row(b, piece, p->v, [&](int64_t g, int key, const R* const* rows) {
      int lane = 0;
      for (; lane + 2 <= lanes; lane += 2)
        add_weighted<R, 2>(out_row(g, lane), width, scores(g, key) + lane, PANEL, rows);
      if (lane < lanes) add_weighted<R, 1>(out_row(g, lane), width, scores(g, key) + lane, PANEL, rows);
    });
  }

  // Which keys of the piece each group sees. False: none sees any.
  bool look(int64_t b, const Piece& piece) {
    bool any = false;
    for (int64_t g = 0; g < tiling->groups; ++g) {
      if (g == 0 || p->has_bias) any |= read_mask(b, g, piece);  // without a bias, groups see the same
      const TileMask<PANEL>& m = work.masker.mask;
      first[g] = m.kind == kIsEmpty ? 0 : m.first[0];
      last[g] = m.kind == kIsEmpty ? 0 : m.last[0];
      __builtin_memcpy(seen + g * kKeys, m.seen, kKeys);
    }
    return any;
  }

  bool read_mask(int64_t b, int64_t g, const Piece& piece) {
    tiling->at(*p, b, g, 0, tile);
    work.masker.begin(tile);
    if (work.masker.read(piece)) return true;
    work.masker.mask.kind = kIsEmpty;
    return false;
  }

  // Calls `use(group, key, rows)` for every four rows of which a group sees one.
  template <class Use>
  void each_row(int64_t b, const Piece& piece, const void* data, const Use& use) {
    constexpr Type same = sizeof(R) == 4 ? F32 : F64;
    const bool in_place = p->type == same && p->H % L == 0;
    const int64_t head_width = in_place ? p->H : width, per_head = tiling->groups / p->K;
    for (int key = 0; key < piece.count; key += 4) {
      const R* base[4];
      for (int i = 0; i < 4; ++i) {
        const int64_t at = (b * p->S + piece.first + key + i) * p->K * p->H;
        base[i] = in_place ? static_cast<const R*>(data) + at : copies + i * p->K * width;
        if (!in_place && key + i < piece.count) convert(copies + i * p->K * width, data, at);
      }
      for (int64_t head = 0; head < p->K; ++head)
        for (int64_t g = head * per_head; g < (head + 1) * per_head; ++g) {
          const R* rows[4];
          bool any = false;
          for (int i = 0; i < 4; ++i) {
            const bool sees = key + i >= first[g] && key + i < last[g] && seen[g * kKeys + key + i];
            rows[i] = sees ? base[i] + head * head_width : zeros;
            any |= sees;
          }
          if (any) use(g, key, rows);
        }
    }
  }

  void convert(R* to, const void* data, int64_t at) {
    for (int64_t head = 0; head < p->K; ++head) {
      read_row(to + head * width, data, p->type, at + head * p->H, p->H);
      for (int64_t h = p->H; h < width; ++h) to[head * width + h] = 0;
    }
  }

  void weigh(int64_t b, int64_t g, const Piece& piece) {
    if (first[g] >= last[g]) return;
    if (p->has_bias) read_mask(b, g, piece);
    tiling->at(*p, b, g, 0, tile);
    select(g);
    if (p->dropout.on) work.drop.begin(*p, tile, work.masker.q);
    if (p->by_distance.slopes) work.slopes.begin(*p, tile, work.masker.q);
    // Rows are used four at a time; those beside the range must not weigh, whatever a query's product with zeros is.
    for (int key = first[g] & ~3; key < ((last[g] + 3) & ~3); ++key)
      if (key < first[g] || key >= last[g]) __builtin_memset(scores(g, key), 0, sizeof(R) * PANEL);
    work.s = scores(g, first[g]);
    alignas(64) R alpha[PANEL];
    work.weigh(0, first[g], last[g] - first[g], alpha);
    for (int lane = 0; lane < lanes; ++lane)
      for (int64_t h = 0; h < width; h += L) store(out_row(g, lane) + h, load(out_row(g, lane) + h) * alpha[lane]);
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
