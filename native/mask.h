// The mask's program, run on one tile: first as ranges (may anything, must everything be allowed?), and only if that
// leaves the tile PARTIAL as truth bytes, one for each pair, laid out [key][query lane] as the score tile is.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "problem.h"

namespace longspan::LONGSPAN_ISA {
namespace {

constexpr int kLanes = 128;  // queries in a tile: many, because each tile of keys is copied once for all of them
constexpr int kKeys = 64;    // keys in a tile, at most

template <class A> static inline A lesser(A a, A b) { return b < a ? b : a; }
template <class A> static inline A greater(A a, A b) { return a < b ? b : a; }
static inline int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// One side of a tile: slots [first, first + count) and their positions.
struct Side {
  int64_t first = 0;
  int count = 0;
  bool steps = true;  // positions grow by one from slot to slot
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

// What the tile asks about: which batch row and head, which queries and keys, and (for bit tiles) which visit.
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

static inline void fill_equal(uint8_t* __restrict row, const int32_t* __restrict lanes, int32_t value) {
  for (int i = 0; i < kLanes; ++i) row[i] = lanes[i] == value ? 0xFF : 0;
}

static inline int32_t clamp32(int64_t x) { return int32_t(greater<int64_t>(INT32_MIN, lesser<int64_t>(INT32_MAX, x))); }

static bool in_set(const int32_t* set, int64_t count, int32_t x) {
  int64_t lo = 0, hi = count;
  while (lo < hi) {
    const int64_t mid = (lo + hi) / 2;
    if (set[mid] < x)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo < count && set[lo] == x;
}

static Truth range_of_flags(const uint8_t* flags, int count) {
  bool any = false, all = true;
  for (int i = 0; i < count; ++i) {
    any |= flags[i] != 0;
    all &= flags[i] != 0;
  }
  return {any, all};
}

static Truth range_of_set(const Op& op, const Side& side) {
  int inside = 0;
  for (int i = 0; i < side.count; ++i) inside += in_set(op.q_ids, op.width, side.pos[i]);
  return {inside > 0, inside == side.count};
}

static inline bool valid_id(const Op& op, int32_t id) {
  return op.sides == 0 ? id >= 0 : op.sides == 1 ? id != 0 : true;
}

static Truth range_of_ids(const Op& op, const TileAt& at) {
  const int32_t* q = op.q_ids + at.b * op.q_stride + at.q->first;
  const int32_t* k = op.kv_ids + at.b * op.kv_stride + at.kv->first;
  int32_t q_lo = q[0], q_hi = q[0], k_lo = k[0], k_hi = k[0];
  for (int i = 0; i < at.q->count; ++i) q_lo = lesser(q_lo, q[i]), q_hi = greater(q_hi, q[i]);
  for (int i = 0; i < at.kv->count; ++i) k_lo = lesser(k_lo, k[i]), k_hi = greater(k_hi, k[i]);
  const bool any = q_lo <= k_hi && k_lo <= q_hi && (op.sides || lesser(q_hi, k_hi) >= 0);
  return {any, any && q_lo == q_hi && k_lo == k_hi && q_lo == k_lo && valid_id(op, q_lo)};
}

// Each query's interval of keys, within the tile.
struct Interval {
  int64_t lo, hi;
};

struct Intervals {
  const int32_t *starts, *stops;
  int64_t first, count;

  Intervals(const Op& op, const TileAt& at) {
    const int64_t row = at.b * op.q_stride + at.n * op.head_stride + at.q->first;
    starts = op.q_ids + row;
    stops = op.kv_ids + row;
    first = at.kv->first;
    count = at.kv->count;
  }
  Interval of(int i) const {
    const int64_t lo = greater<int64_t>(0, lesser<int64_t>(starts[i] - first, count));
    return {lo, greater<int64_t>(lo, lesser<int64_t>(stops[i] - first, count))};
  }
};

static Truth range_of_between(const Op& op, const TileAt& at) {
  const Intervals in(op, at);
  bool any = false, all = true;
  for (int i = 0; i < at.q->count; ++i) {
    const Interval x = in.of(i);
    any |= x.lo < x.hi;
    all &= x.hi - x.lo == in.count;
  }
  return {any, all};
}

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
      const int32_t* row = op.q_ids + at.b * op.q_stride + at.n * op.head_stride + qb * op.width;
      for (int64_t j = 0; j < op.width; ++j) hit |= row[j] >= k_first && row[j] <= k_last;
    }
    r.any |= hit;
    r.all &= hit;
  }
  return r;
}

// Where the bits of a tile's pairs lie; what was not stored is not allowed.
struct BitTile {
  const uint8_t* first;
  int64_t stride, s0;  // bytes from one query to the next; where the tile's keys begin within a row of bits
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

// Most tiles of a rule with bounds are all 0 or all 1, and telling that costs less than a byte for each pair.
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
  const Side &q = *at.q, &kv = *at.kv;
  const int64_t lo = int64_t(kv.lo) - q.hi, hi = int64_t(kv.hi) - q.lo;  // of k - q over the tile
  switch (op.code) {
    case kFull: return {true, true};
    case kEmpty: return {false, false};
    case kBand: {
      const int64_t least = op.sides & 1 ? op.lo.at(at.b) : INT64_MIN, most = op.sides & 2 ? op.hi.at(at.b) : INT64_MAX;
      return {hi >= least && lo <= most && least <= most, lo >= least && hi <= most};
    }
    case kStride: return {true, op.lo.at(at.b) == 1};
    case kChunk: {
      const int64_t size = op.lo.at(at.b);
      if (size < 1) return {false, false};
      const int64_t a = floor_div(q.lo, size), b = floor_div(q.hi, size);
      const int64_t c = floor_div(kv.lo, size), d = floor_div(kv.hi, size);
      return {a <= d && c <= b, a == b && c == d && a == c};
    }
    case kBlockCausal: {
      const int64_t size = op.lo.at(at.b);
      if (size < 1) return {false, false};
      return {floor_div(kv.lo, size) <= floor_div(q.hi, size), floor_div(kv.hi, size) <= floor_div(q.lo, size)};
    }
    case kPrefix: return {kv.lo < op.lo.at(at.b), kv.hi < op.lo.at(at.b)};
    case kQLength: return {q.first < op.lo.at(at.b), q.first + q.count <= op.lo.at(at.b)};
    case kKvLength: return {kv.first < op.lo.at(at.b), kv.first + kv.count <= op.lo.at(at.b)};
    case kBetween: return range_of_between(op, at);
    case kIds: return range_of_ids(op, at);
    case kQFlags: return range_of_flags(op.flags + at.b * op.q_stride + q.first, q.count);
    case kKvFlags: return range_of_flags(op.flags + at.b * op.kv_stride + kv.first, kv.count);
    case kQSet: return range_of_set(op, q);
    case kKvSet: return range_of_set(op, kv);
    case kBlocks: return range_of_blocks(op, at);
    case kDenseAt: return range_of_dense_at(op, at);
    case kBits: return range_of_bits(op, at);
    default: return {true, false};
  }
}

static int part_of(const Op& op, const TileAt& at) {
  const int64_t head = at.p->head_ids ? at.p->head_ids[at.n] : at.n;
  return int(lesser<int64_t>(greater<int64_t>(head, 0), op.count - 1));
}

// Kleene logic over the tile; needs no scratch but the stack.
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

static void residues(int32_t* out, const Side& side, int64_t d) {
  if (side.steps) {
    int64_t r = side.pos[0] - floor_div(side.pos[0], d) * d;
    for (int i = 0; i < side.count; ++i, r = r + 1 == d ? 0 : r + 1) out[i] = int32_t(r);
  } else {
    for (int i = 0; i < side.count; ++i) out[i] = int32_t(side.pos[i] - floor_div(side.pos[i], d) * d);
  }
}

static void write_band(const Op& op, const TileAt& at, Row* out) {
  const Side &q = *at.q, &kv = *at.kv;
  const int64_t least = op.sides & 1 ? op.lo.at(at.b) : -(int64_t(1) << 40);
  const int64_t most = op.sides & 2 ? op.hi.at(at.b) : int64_t(1) << 40;
  for (int s = 0; s < kv.count; ++s) {
    const int64_t a = kv.pos[s] - most, b = kv.pos[s] - least;  // a <= q <= b
    if (q.steps) {
      fill_lanes(out[s], a - q.pos[0], b - q.pos[0] + 1);
    } else {
      const int32_t lo = clamp32(a), hi = clamp32(b);
      for (int i = 0; i < kLanes; ++i) out[s][i] = (q.pos[i] >= lo) & (q.pos[i] <= hi) ? 0xFF : 0;
      if (a > INT32_MAX || b < INT32_MIN) fill_row(out[s], 0);
    }
  }
}

static void write_chunk(int64_t size, const TileAt& at, Row* out) {
  const Side &q = *at.q, &kv = *at.kv;
  int32_t chunk[kLanes] = {0};
  if (!q.steps)
    for (int i = 0; i < q.count; ++i) chunk[i] = int32_t(floor_div(q.pos[i], size));
  for (int s = 0; s < kv.count; ++s) {
    const int64_t c = floor_div(kv.pos[s], size);
    if (q.steps)
      fill_lanes(out[s], c * size - q.pos[0], (c + 1) * size - q.pos[0]);
    else
      fill_equal(out[s], chunk, int32_t(c));
  }
}

static void write_block_causal(int64_t size, const TileAt& at, Row* out) {
  const Side &q = *at.q, &kv = *at.kv;
  for (int s = 0; s < kv.count; ++s) {
    const int64_t from = floor_div(kv.pos[s], size) * size;  // q >= from
    if (q.steps) {
      fill_lanes(out[s], from - q.pos[0], kLanes);
    } else {
      const int32_t lo = clamp32(from);
      for (int i = 0; i < kLanes; ++i) out[s][i] = q.pos[i] >= lo ? 0xFF : 0;
    }
  }
}

static void write_between(const Op& op, const TileAt& at, Row* out) {
  // Bytes: a tile has fewer keys than a byte counts, and comparing bytes takes a quarter of the time.
  uint8_t lo[kLanes] = {0}, width[kLanes] = {0};
  const Intervals in(op, at);
  for (int i = 0; i < at.q->count; ++i) {
    const Interval x = in.of(i);
    lo[i] = uint8_t(x.lo);
    width[i] = uint8_t(x.hi - x.lo);
  }
  for (int s = 0; s < at.kv->count; ++s)
    for (int i = 0; i < kLanes; ++i) out[s][i] = uint8_t(uint8_t(s) - lo[i]) < width[i] ? 0xFF : 0;
}

static void write_blocks(const Op& op, const TileAt& at, Row* out) {
  const Side &q = *at.q, &kv = *at.kv;
  for (int s = 0; s < kv.count; ++s) fill_row(out[s], 0);
  for (int64_t qb = q.first / op.block; qb * op.block < q.first + q.count && qb < op.rows; ++qb) {
    const int64_t a = greater<int64_t>(0, qb * op.block - q.first);
    const int64_t b = lesser<int64_t>(q.count, (qb + 1) * op.block - q.first);
    const int32_t* row = op.q_ids + at.b * op.q_stride + at.n * op.head_stride + qb * op.width;
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
  // Where the tile's slots lie in the array, and which of them do; a side without an offset is all there.
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
  uint8_t column[kLanes] = {0};  // of every query the byte that holds the key's bit: read once for eight keys
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
  const Side &q = *at.q, &kv = *at.kv;
  int32_t lanes[kLanes] = {0};
  switch (op.code) {
    case kBand: return write_band(op, at, out);
    case kChunk: return write_chunk(op.lo.at(at.b), at, out);
    case kBlocks: return write_blocks(op, at, out);
    case kDense: return write_dense(op, at, out);
    case kDenseAt: return write_dense_at(op, at, out);
    case kBetween: return write_between(op, at, out);
    case kBlockCausal: return write_block_causal(op.lo.at(at.b), at, out);
    case kBits: return write_bits(op, at, out);
    case kStride: {
      const int64_t d = op.lo.at(at.b);
      int32_t keys[kKeys];
      if (d < 1) break;
      residues(lanes, q, d);
      residues(keys, kv, d);
      for (int s = 0; s < kv.count; ++s) fill_equal(out[s], lanes, keys[s]);
      return;
    }
    case kPrefix:
      for (int s = 0; s < kv.count; ++s) fill_row(out[s], kv.pos[s] < op.lo.at(at.b) ? 0xFF : 0);
      return;
    case kKvLength:
      for (int s = 0; s < kv.count; ++s) fill_row(out[s], kv.first + s < op.lo.at(at.b) ? 0xFF : 0);
      return;
    case kQLength: {
      const int64_t length = op.lo.at(at.b);
      for (int s = 0; s < kv.count; ++s) fill_lanes(out[s], 0, length - q.first);
      return;
    }
    case kIds: {
      const int32_t* k = op.kv_ids + at.b * op.kv_stride + kv.first;
      __builtin_memcpy(lanes, op.q_ids + at.b * op.q_stride + q.first, sizeof(int32_t) * size_t(q.count));
      for (int s = 0; s < kv.count; ++s)
        if (valid_id(op, k[s]))
          fill_equal(out[s], lanes, k[s]);
        else
          fill_row(out[s], 0);
      return;
    }
    case kQFlags:
    case kQSet: {
      uint8_t row[kLanes] = {0};
      for (int i = 0; i < q.count; ++i)
        if (op.code == kQSet ? in_set(op.q_ids, op.width, q.pos[i]) : op.flags[at.b * op.q_stride + q.first + i] != 0)
          row[i] = 0xFF;
      for (int s = 0; s < kv.count; ++s) __builtin_memcpy(out[s], row, kLanes);
      return;
    }
    case kKvFlags:
      for (int s = 0; s < kv.count; ++s) fill_row(out[s], op.flags[at.b * op.kv_stride + kv.first + s] ? 0xFF : 0);
      return;
    case kKvSet:
      for (int s = 0; s < kv.count; ++s) fill_row(out[s], in_set(op.q_ids, op.width, kv.pos[s]) ? 0xFF : 0);
      return;
    default: break;
  }
  for (int s = 0; s < kv.count; ++s) fill_row(out[s], op.code == kFull ? 0xFF : 0);
}

// A stack entry is a promise (EMPTY, FULL) or, if PARTIAL, the bytes at its height of the stack.
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

// The mask of one tile, as the kernels use it: for every panel (the lanes of one micro-kernel) the keys that any of its
// queries sees, and whether within them some pair is forbidden.
template <int PANEL>
struct TileMask {
  static constexpr int panels = kLanes / PANEL;
  Kind kind;
  int first[panels], last[panels];  // keys [first, last); empty: first == last
  bool exact[panels];               // everything inside is allowed: no bytes needed
  int lo, hi;                       // union over the panels
  uint8_t seen[kKeys];              // keys that some query of the tile sees
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

// Whether a panel's bytes hold some truth, and some untruth in lanes that hold a query; clears all other lanes.
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

// Reads the ranges off the truth bytes. `valid` has 0xFF in the lanes that hold a query.
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
