// One tile of pairs, as mask leaves read it: its queries and keys, and one truth byte per pair, in the order
// [key][query lane] of the score tile.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "problem.h"

namespace longspan::LONGSPAN_ISA {
namespace {

constexpr int kLanes = 128;  // queries per tile: many, because each tile of keys is copied once for all of them
constexpr int kKeys = 64;    // maximum number of keys per tile

template <class A> static inline A lesser(A a, A b) { return b < a ? b : a; }
template <class A> static inline A greater(A a, A b) { return a < b ? b : a; }
static inline int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// One side of a tile: slots [first, first + count) and their positions.
struct Side {
  int64_t first = 0;
  int count = 0;
  bool steps = true;  // whether positions increase by one from slot to slot
  int32_t lo = 0, hi = 0;
  int32_t pos[kLanes > kKeys ? kLanes : kKeys];
};

static inline void read_side(Side& side, const int32_t* positions, int64_t first, int count) {
  side.first = first;
  side.count = count;
  if (!positions) {
    for (int i = 0; i < count; ++i) side.pos[i] = int32_t(first + i);
    side.steps = true;
    side.lo = int32_t(first);
    side.hi = int32_t(first + count - 1);
    return;
  }
  positions += first;
  int32_t lo = positions[0], hi = positions[0], broken = 0;
  for (int i = 0; i < count; ++i) {
    side.pos[i] = positions[i];
    lo = lesser(lo, positions[i]);
    hi = greater(hi, positions[i]);
  }
  for (int i = 1; i < count; ++i) broken |= int64_t(positions[i]) != int64_t(positions[i - 1]) + 1;
  side.steps = !broken;
  side.lo = lo;
  side.hi = hi;
}

// The location of a tile: batch row, head, queries, keys and, for bit tiles, the visit.
struct TileAt {
  const Problem* p;
  int64_t b, n;
  const Side* q;
  const Side* kv;
  int64_t layout_row;  // (batch, head) row of the layout
  int64_t q_tile, visit, kv_tile;
};

struct Truth {
  bool any, all;
};

typedef uint8_t Row[kLanes];

static inline void fill_row(uint8_t* row, int value) { __builtin_memset(row, value, kLanes); }

// Lanes [a, b).
static inline void fill_lanes(uint8_t* __restrict row, int64_t a, int64_t b) {
  const uint8_t lo = uint8_t(greater<int64_t>(0, lesser<int64_t>(a, kLanes)));
  const uint8_t hi = uint8_t(greater<int64_t>(lo, lesser<int64_t>(b, kLanes)));
  const uint8_t width = uint8_t(hi - lo);
  for (int i = 0; i < kLanes; ++i) row[i] = uint8_t(uint8_t(i) - lo) < width ? 0xFF : 0;
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
