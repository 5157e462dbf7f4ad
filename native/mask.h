// Runs the mask program on one tile: first as ranges (is any pair, are all pairs allowed?), and only if the tile is
// PARTIAL as truth bytes. The leaves are in leaves.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "leaves.h"
#include "problem.h"

namespace longspan::LONGSPAN_ISA {
namespace {

static int part_of(const Op& op, const TileAt& at) {
  const int64_t head = at.p->head_ids ? at.p->head_ids[at.n] : at.n;
  return int(lesser<int64_t>(greater<int64_t>(head, 0), op.count - 1));
}

// Evaluates the program in Kleene logic on whole tiles. It needs only the stack.
static Truth classify(const Problem& p, int64_t begin, int64_t end, const TileAt& at) {
  Truth stack[kMaxStack];
  int top = 0;
  for (int64_t i = begin; i < end; ++i) {
    const Op& op = p.ops[i];
    if (op.code == kAnd || op.code == kOr) {
      const Truth b = stack[--top], a = stack[top - 1];
      stack[top - 1] = op.code == kAnd ? Truth{a.any && b.any, a.all && b.all} : Truth{a.any || b.any, a.all || b.all};
    } else if (op.code == kNot) {
      stack[top - 1] = {!stack[top - 1].all, !stack[top - 1].any};
    } else if (op.code == kPerHead) {
      const int64_t* part = p.parts + op.first + part_of(op, at);
      stack[top++] = classify(p, part[0], part[1], at);
      i = op.next - 1;
    } else {
      stack[top++] = range_of(op, at);
    }
  }
  return stack[0];
}

// A stack entry is EMPTY or FULL, or PARTIAL with the bytes at its height of the stack.
enum Kind { kIsEmpty, kIsPartial, kIsFull };

static Kind combine(Code code, Kind a, Kind b, Row* x, const Row* y, int keys) {
  const Kind absorbing = code == kAnd ? kIsEmpty : kIsFull, neutral = code == kAnd ? kIsFull : kIsEmpty;
  if (a == absorbing || b == absorbing) return absorbing;
  if (b == neutral) return a;
  if (a == neutral) {
    __builtin_memcpy(x, y, sizeof(Row) * size_t(keys));
    return b;
  }
  uint8_t* __restrict u = x[0];
  const uint8_t* __restrict w = y[0];
  if (code == kAnd)
    for (int i = 0; i < keys * kLanes; ++i) u[i] &= w[i];
  else
    for (int i = 0; i < keys * kLanes; ++i) u[i] |= w[i];
  return kIsPartial;
}

// Writes the truth bytes to stack[0] (kKeys rows for each height of the stack).
static Kind evaluate(const Problem& p, int64_t begin, int64_t end, const TileAt& at, Row* stack) {
  const int keys = at.kv->count;
  Kind kind[kMaxStack];
  int top = 0;
  for (int64_t i = begin; i < end; ++i) {
    const Op& op = p.ops[i];
    Row* out = stack + int64_t(top) * kKeys;
    if (op.code == kAnd || op.code == kOr) {
      --top;
      kind[top - 1] = combine(op.code, kind[top - 1], kind[top], stack + (top - 1) * kKeys, stack + top * kKeys, keys);
    } else if (op.code == kNot) {
      uint8_t* x = stack[(top - 1) * kKeys];
      Kind& k = kind[top - 1];
      if (k == kIsPartial)
        for (int j = 0; j < keys * kLanes; ++j) x[j] = uint8_t(~x[j]);
      k = k == kIsEmpty ? kIsFull : k == kIsFull ? kIsEmpty : kIsPartial;
    } else if (op.code == kPerHead) {
      const int64_t* part = p.parts + op.first + part_of(op, at);
      kind[top++] = evaluate(p, part[0], part[1], at, out);
      i = op.next - 1;
    } else {
      const Truth r = range_of(op, at);
      kind[top] = !r.any ? kIsEmpty : r.all ? kIsFull : kIsPartial;
      if (kind[top] == kIsPartial) write_leaf(op, at, out);
      ++top;
    }
  }
  return kind[0];
}

// The mask of one tile in the form of the kernels: for every panel (the lanes of one micro-kernel) the range of keys
// that any of its queries sees, and whether that range has masked pairs.
template <int PANEL>
struct TileMask {
  static constexpr int panels = kLanes / PANEL;
  Kind kind;
  int first[panels], last[panels];  // keys [first, last); empty: first == last
  bool exact[panels];               // every pair in the range is allowed: no bytes needed
  int lo, hi;                       // union over the panels
  uint8_t seen[kKeys];              // whether some query of the tile sees the key
  Row* bytes;                       // PARTIAL: the truth bytes
};

template <int PANEL>
static void all_allowed(TileMask<PANEL>& m, int keys, int lanes) {
  m.kind = kIsFull;
  m.lo = 0;
  m.hi = keys;
  for (int i = 0; i < m.panels; ++i) {
    m.first[i] = 0;
    m.last[i] = i * PANEL < lanes ? keys : 0;
    m.exact[i] = true;
  }
  __builtin_memset(m.seen, 1, kKeys);
}

struct Ends {
  uint64_t any, missing;
};

// Whether a panel's bytes have an allowed pair, and a masked pair, in lanes that hold a query. Clears all other lanes.
template <int PANEL>
static inline Ends ends(uint8_t* row, const uint8_t* valid) {
  Ends e = {0, 0};
  constexpr int step = PANEL < 8 ? PANEL : 8;
  for (int j = 0; j < PANEL; j += step) {
    uint64_t x = 0, v = 0;
    __builtin_memcpy(&x, row + j, step);
    __builtin_memcpy(&v, valid + j, step);
    x &= v;
    __builtin_memcpy(row + j, &x, step);
    e.any |= x;
    e.missing |= x ^ v;
  }
  return e;
}

// Computes the ranges from the truth bytes. `valid` has 0xFF in the lanes that hold a query.
template <int PANEL>
static void summarize(TileMask<PANEL>& m, int keys, int lanes, const uint8_t* valid) {
  m.lo = keys;
  m.hi = 0;
  __builtin_memset(m.seen, 0, kKeys);
  for (int i = 0; i < m.panels; ++i) {
    m.first[i] = m.last[i] = 0;
    m.exact[i] = true;
    if (i * PANEL >= lanes) continue;
    int first = keys, last = 0, full_first = keys, full_last = 0, full = 0;
    for (int s = 0; s < keys; ++s) {
      const Ends e = ends<PANEL>(m.bytes[s] + i * PANEL, valid + i * PANEL);
      const bool any = e.any != 0, all = e.missing == 0;
      if (any) {
        first = lesser(first, s);
        last = s + 1;
        m.seen[s] = 1;
      }
      if (all) {
        full_first = lesser(full_first, s);
        full_last = s + 1;
        ++full;
      }
    }
    if (first >= last) continue;
    m.first[i] = first;
    m.last[i] = last;
    m.exact[i] = full == last - first && full_first == first && full_last == last;
    m.lo = lesser(m.lo, first);
    m.hi = greater(m.hi, last);
  }
  m.kind = m.lo < m.hi ? kIsPartial : kIsEmpty;
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
