// Evaluates the leaves of a mask program on one tile: as a range (is any pair, are all pairs allowed?), and as one
// truth byte per pair.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "problem.h"
#include "side.h"
#include "within.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// Whether slots [first, first + count) reach into an array of `size` entries that begins at `offset`.
static inline bool overlap(int64_t first, int64_t count, int64_t offset, int64_t size) {
  return first < offset + size && offset < first + count;
}

static Truth range_of_dense_at(const Op& op, const TileAt& at) {
  const bool q = !(op.sides & 1) || overlap(at.q->first, at.q->count, op.lo.at(at.b), op.rows);
  const bool kv = !(op.sides & 2) || overlap(at.kv->first, at.kv->count, op.hi.at(at.b), op.width);
  return {q && kv, false};
}

static Truth range_of_blocks(const Op& op, const TileAt& at) {
  const int64_t q_first = at.q->first / op.block, q_last = (at.q->first + at.q->count - 1) / op.block;
  const int64_t k_first = at.kv->first / op.block, k_last = (at.kv->first + at.kv->count - 1) / op.block;
  Truth r = {false, k_first == k_last};
  for (int64_t qb = q_first; qb <= q_last; ++qb) {
    bool hit = false;
    if (qb < op.rows) {
      const int32_t* row = op.table + at.b * op.b_stride + at.n * op.head_stride + qb * op.width;
      for (int64_t j = 0; j < op.width; ++j) hit |= row[j] >= k_first && row[j] <= k_last;
    }
    r.any |= hit;
    r.all &= hit;
  }
  return r;
}

// The address of the bits of a tile's pairs. Pairs of a tile that is not stored are not allowed.
struct BitTile {
  const uint8_t* first;
  int64_t stride, s0;  // bytes from one query to the next; the tile's first key within a row of bits
  bool stored;

  BitTile(const Op& op, const TileAt& at) {
    const Layout& l = at.p->layout;
    stride = (l.kv_tile + 7) / 8;
    s0 = at.kv->first - at.kv_tile * l.kv_tile;
    stored = at.visit < op.width;
    const int64_t t0 = at.q->first - at.q_tile * l.q_tile;
    first = op.flags + (((at.layout_row * l.nq + at.q_tile) * op.width + at.visit) * l.q_tile + t0) * stride;
  }
  const uint8_t* row(int64_t i) const { return first + i * stride; }
};

// Most tiles of a rule with bounds are all 0 or all 1. Testing for that is cheaper than writing a byte per pair.
static Truth range_of_bits(const Op& op, const TileAt& at) {
  const BitTile bits(op, at);
  if (!bits.stored) return {false, false};
  if (bits.s0 % 8) return {true, false};
  const int bytes = at.kv->count / 8, rest = at.kv->count % 8;
  const uint8_t mask = uint8_t((1 << rest) - 1);
  uint8_t any = 0, all = 0xFF, last_any = 0, last_all = mask;
  for (int i = 0; i < at.q->count; ++i) {
    const uint8_t* row = bits.row(i) + bits.s0 / 8;
    for (int j = 0; j < bytes; ++j) any |= row[j], all &= row[j];
    if (rest) last_any |= row[bytes] & mask, last_all &= row[bytes];
  }
  return {any || last_any, all == 0xFF && last_all == mask};
}

static Truth range_of(const Op& op, const TileAt& at) {
  switch (op.code) {
    case kFull: return {true, true};
    case kEmpty: return {false, false};
    case kWithin: return range_of_within(op, at);
    case kBlocks: return range_of_blocks(op, at);
    case kDenseAt: return range_of_dense_at(op, at);
    case kBits: return range_of_bits(op, at);
    default: return {true, false};
  }
}

static void write_blocks(const Op& op, const TileAt& at, Row* out) {
  const Side &q = *at.q, &kv = *at.kv;
  for (int s = 0; s < kv.count; ++s) fill_row(out[s], 0);
  for (int64_t qb = q.first / op.block; qb * op.block < q.first + q.count && qb < op.rows; ++qb) {
    const int64_t a = greater<int64_t>(0, qb * op.block - q.first);
    const int64_t b = lesser<int64_t>(q.count, (qb + 1) * op.block - q.first);
    const int32_t* row = op.table + at.b * op.b_stride + at.n * op.head_stride + qb * op.width;
    for (int64_t j = 0; j < op.width; ++j) {
      if (row[j] < 0) continue;
      const int64_t lo = greater<int64_t>(0, row[j] * op.block - kv.first);
      const int64_t hi = lesser<int64_t>(kv.count, (int64_t(row[j]) + 1) * op.block - kv.first);
      for (int64_t s = lo; s < hi; ++s) __builtin_memset(out[s] + a, 0xFF, size_t(b - a));
    }
  }
}

static void write_dense(const Op& op, const TileAt& at, Row* out) {
  const uint8_t* base = static_cast<const uint8_t*>(op.view.data) + at.b * op.view.b + at.n * op.view.n +
                        at.q->first * op.view.t + at.kv->first * op.view.s;
  for (int i = 0; i < at.q->count; ++i)
    for (int s = 0; s < at.kv->count; ++s) out[s][i] = base[i * op.view.t + s * op.view.s] ? 0xFF : 0;
}

static void write_dense_at(const Op& op, const TileAt& at, Row* out) {
  const Side &q = *at.q, &kv = *at.kv;
  for (int s = 0; s < kv.count; ++s) fill_row(out[s], 0);
  // The tile's first slots as indices into the array, and the slots inside it. Without an offset, all slots are.
  const int64_t t0 = op.sides & 1 ? q.first - op.lo.at(at.b) : q.first;
  const int64_t s0 = op.sides & 2 ? kv.first - op.hi.at(at.b) : kv.first;
  const int64_t q_from = op.sides & 1 ? greater<int64_t>(0, -t0) : 0;
  const int64_t kv_from = op.sides & 2 ? greater<int64_t>(0, -s0) : 0;
  const int64_t q_to = op.sides & 1 ? lesser<int64_t>(q.count, op.rows - t0) : q.count;
  const int64_t kv_to = op.sides & 2 ? lesser<int64_t>(kv.count, op.width - s0) : kv.count;
  const uint8_t* base = static_cast<const uint8_t*>(op.view.data) + at.b * op.view.b + at.n * op.view.n;
  for (int64_t i = q_from; i < q_to; ++i)
    for (int64_t s = kv_from; s < kv_to; ++s) out[s][i] = base[(t0 + i) * op.view.t + (s0 + s) * op.view.s] ? 0xFF : 0;
}

static void write_bits(const Op& op, const TileAt& at, Row* out) {
  const BitTile bits(op, at);
  uint8_t column[kLanes] = {0};  // for each query, the byte with the key's bit; it is read once for eight keys
  for (int64_t s = 0, loaded = -1; s < at.kv->count; ++s) {
    const int64_t byte = (bits.s0 + s) / 8;
    if (bits.stored && byte != loaded)
      for (int i = 0; i < at.q->count; ++i) column[i] = bits.row(i)[byte];
    loaded = byte;
    const uint8_t bit = uint8_t(1 << (bits.s0 + s) % 8);
    uint8_t* __restrict row = out[s];
    for (int i = 0; i < kLanes; ++i) row[i] = column[i] & bit ? 0xFF : 0;
  }
}

static void write_leaf(const Op& op, const TileAt& at, Row* out) {
  switch (op.code) {
    case kWithin: return write_within(op, at, out);
    case kBlocks: return write_blocks(op, at, out);
    case kDense: return write_dense(op, at, out);
    case kDenseAt: return write_dense_at(op, at, out);
    case kBits: return write_bits(op, at, out);
    default: break;
  }
  for (int s = 0; s < at.kv->count; ++s) fill_row(out[s], op.code == kFull ? 0xFF : 0);
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
