// The comparison of a mask program on one tile: low(q) <= kv <= high(q), for the values of terms.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "problem.h"
#include "side.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// The index of the first entry of an ascending list that is not less than x.
static int64_t place_in(const int32_t* list, int64_t count, int64_t x) {
  int64_t lo = 0, hi = count;
  while (lo < hi) {
    const int64_t mid = (lo + hi) / 2;
    if (list[mid] < x)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

// A term for the tokens of one side, in one batch row and head. Numbers that are the same for all tokens are read once.
struct TermAt {
  const Term* term;
  const Side* side;
  Source of;
  int64_t divide, modulo, plus;
  int64_t number = 0;  // kNumber: the value
  const int32_t* entries = nullptr;
  const uint8_t* flags = nullptr;

  // Divisors are at least 1, whatever an operand holds.
  TermAt(const Term& t, const TileAt& at, const Side& s) : term(&t), side(&s), of(t.of) {
    divide = greater<int64_t>(1, t.divide.at(at.b));
    modulo = greater<int64_t>(t.modulo.data ? 1 : 0, t.modulo.at(at.b));
    plus = t.plus.at(at.b);
    const int64_t row = at.b * t.b_stride + at.n * t.n_stride + s.first;
    if (of == kNumber) number = formed(t.number.at(at.b));
    if (of == kArray && t.flags) flags = t.flags + row;
    if (of == kArray && t.data) entries = t.data + row;
  }

  int64_t formed(int64_t x) const {
    if (divide != 1) x = floor_div(x, divide);
    if (modulo) x -= floor_div(x, modulo) * modulo;
    return x + plus;
  }
  bool is_place() const { return of == kPosition || of == kSlot; }
  int64_t least_place() const { return of == kSlot ? side->first : side->lo; }
  int64_t greatest_place() const { return of == kSlot ? side->first + side->count - 1 : side->hi; }
  // Whether places increase by one from token to token.
  bool steps() const { return of == kSlot || (of == kPosition && side->steps); }
  bool grows() const { return steps() && !modulo; }
  int64_t first() const { return least_place(); }  // if steps()
};

// The range of the values of a side's valid tokens. Without valid tokens it is empty: lo is above every value, and hi
// is below every value.
struct Range {
  int64_t lo, hi;
  bool total;
};
constexpr Range kNone = {int64_t(1) << 40, -(int64_t(1) << 40), false};

template <int VALID>
static inline bool is_valid(int32_t x) {
  return VALID == kAnyEntry || (VALID == kNotNegative ? x >= 0 : x != 0);
}

template <int VALID>
static Range range_of_entries(const int32_t* __restrict x, int count) {
  int32_t lo = INT32_MAX, hi = INT32_MIN, invalid = 0;
  for (int i = 0; i < count; ++i) {  // with bit operations: compilers do not vectorise the ?: operator here
    const int32_t not_valid = is_valid<VALID>(x[i]) ? 0 : -1;
    lo = lesser(lo, (x[i] & ~not_valid) | (INT32_MAX & not_valid));
    hi = greater(hi, (x[i] & ~not_valid) | (INT32_MIN & not_valid));
    invalid |= not_valid;
  }
  return lo > hi ? kNone : Range{lo, hi, !invalid};
}

static Range range_of_flags(const TermAt& t) {
  uint8_t least = 0xFF, greatest = 0;
  for (int i = 0; i < t.side->count; ++i) least = lesser(least, t.flags[i]), greatest = greater(greatest, t.flags[i]);
  if (t.term->valid != kNotZero) return {least != 0, greatest != 0, true};
  return greatest ? Range{1, 1, least != 0} : kNone;
}

static Range range_of_array(const TermAt& t) {
  if (t.flags) return range_of_flags(t);
  switch (t.term->valid) {
    case kNotNegative: return range_of_entries<kNotNegative>(t.entries, t.side->count);
    case kNotZero: return range_of_entries<kNotZero>(t.entries, t.side->count);
    default: return range_of_entries<kAnyEntry>(t.entries, t.side->count);
  }
}

static bool is_member(const TermAt& t, int32_t x) {
  const int64_t i = place_in(t.term->data, t.term->count, x);
  return i < t.term->count && t.term->data[i] == x;
}

static Range range_of_members(const TermAt& t) {
  const Side& side = *t.side;
  int64_t inside = 0;
  if (side.steps)
    inside =
        place_in(t.term->data, t.term->count, int64_t(side.hi) + 1) - place_in(t.term->data, t.term->count, side.lo);
  else
    for (int i = 0; i < side.count; ++i) inside += is_member(t, side.pos[i]);
  return {inside == side.count, inside > 0, true};
}

static Range range_of_source(const TermAt& t) {
  switch (t.of) {
    case kArray: return range_of_array(t);
    case kMember: return range_of_members(t);
    default: return {t.least_place(), t.greatest_place(), true};
  }
}

static Range range_of_term(const TermAt& t) {
  if (t.of == kNumber) return {t.number, t.number, true};
  Range r = range_of_source(t);
  if (r.lo > r.hi) return r;
  if (t.divide != 1) r.lo = floor_div(r.lo, t.divide), r.hi = floor_div(r.hi, t.divide);
  if (t.modulo) {
    const int64_t turn = floor_div(r.lo, t.modulo) * t.modulo;
    const bool one = r.hi - turn < t.modulo;
    r.lo = one ? r.lo - turn : 0;
    r.hi = one ? r.hi - turn : t.modulo - 1;
  }
  return {r.lo + t.plus, r.hi + t.plus, r.total};
}

// Two places have equal residues if their distance is a multiple of the modulus. The range of distances gives tighter
// bounds than the ranges of residues.
static bool by_distance(const TermAt& a, const TermAt& b) {
  return a.is_place() && b.is_place() && a.modulo && a.modulo == b.modulo && a.plus == b.plus && a.divide == 1 &&
         b.divide == 1;
}

static Truth range_of_distance(const TermAt& q, const TermAt& kv) {
  const int64_t lo = kv.least_place() - q.greatest_place(), hi = kv.greatest_place() - q.least_place();
  const bool any = floor_div(hi, q.modulo) * q.modulo >= lo;
  return {any, any && (lo == hi || q.modulo == 1)};
}

static Truth range_of_within(const Op& op, const TileAt& at) {
  const TermAt kv(op.kv, at, *at.kv);
  if (op.ends & kSame) {
    const TermAt same(op.low, at, *at.q);
    if (by_distance(same, kv)) return range_of_distance(same, kv);
    const Range q = range_of_term(same), k = range_of_term(kv);
    return {q.lo <= k.hi && k.lo <= q.hi, q.total && k.total && q.lo == k.hi && k.lo == q.hi};
  }
  const Range k = range_of_term(kv);
  Truth r = {true, k.total};
  if (op.ends & kLow) {
    const Range low = range_of_term(TermAt(op.low, at, *at.q));
    const int64_t most = op.ends & kLowStrict ? -1 : 0;
    r = {low.lo <= k.hi + most, r.all && low.total && low.hi <= k.lo + most};
  }
  if (op.ends & kHigh) {
    const Range high = range_of_term(TermAt(op.high, at, *at.q));
    const int64_t least = op.ends & kHighStrict ? 1 : 0;
    r = {r.any && high.hi >= k.lo + least, r.all && high.total && high.lo >= k.hi + least};
  }
  return r;
}

// The values of a term, and 0xFF where they are valid. Entries after the last token hold any value.
template <int N>
struct Values {
  int32_t of[N] = {0};
  uint8_t valid[N];
};

// Values of tokens whose places increase by one: only the first needs a division.
static void count_up(const TermAt& t, int32_t* __restrict out) {
  const int count = t.side->count;
  int64_t value = t.formed(t.first()) - t.plus;
  if (t.divide == 1 && !t.modulo) {
    const uint32_t first = uint32_t(value + t.plus);
    for (int i = 0; i < count; ++i) out[i] = int32_t(first + uint32_t(i));
  } else if (t.divide == 1) {
    for (int i = 0; i < count; ++i, value = value + 1 == t.modulo ? 0 : value + 1) out[i] = int32_t(value + t.plus);
  } else {
    int64_t rest = t.first() - floor_div(t.first(), t.divide) * t.divide;
    for (int i = 0; i < count; ++i) {
      out[i] = int32_t(value + t.plus);
      rest = rest + 1 == t.divide ? 0 : rest + 1;
      value += rest == 0;
      value = value == t.modulo ? 0 : value;
    }
  }
}

template <int VALID>
static void check_entries(const int32_t* __restrict x, int count, uint8_t* __restrict valid) {
  for (int i = 0; i < count; ++i) valid[i] = is_valid<VALID>(x[i]) ? 0xFF : 0;
}

static void read_array(const TermAt& t, int32_t* __restrict out, uint8_t* __restrict valid) {
  const int count = t.side->count;
  if (t.flags) {
    for (int i = 0; i < count; ++i) out[i] = t.flags[i] != 0;
    if (t.term->valid == kNotZero)
      for (int i = 0; i < count; ++i) valid[i] = t.flags[i] ? 0xFF : 0;
    return;
  }
  __builtin_memcpy(out, t.entries, sizeof(int32_t) * size_t(count));
  if (t.term->valid == kNotNegative) check_entries<kNotNegative>(t.entries, count, valid);
  if (t.term->valid == kNotZero) check_entries<kNotZero>(t.entries, count, valid);
}

static void read_members(const TermAt& t, int32_t* __restrict out) {
  const Side& side = *t.side;
  if (!side.steps) {
    for (int i = 0; i < side.count; ++i) out[i] = is_member(t, side.pos[i]);
    return;
  }
  const int32_t* list = t.term->data;
  for (int64_t i = place_in(list, t.term->count, side.lo); i < t.term->count && list[i] <= side.hi; ++i)
    if (list[i] >= side.lo) out[list[i] - side.lo] = 1;
}

template <int N>
static void read_values(const TermAt& t, Values<N>& out) {
  const int count = t.side->count;
  __builtin_memset(out.valid, 0xFF, N);
  if (t.steps()) return count_up(t, out.of);
  switch (t.of) {
    case kArray: read_array(t, out.of, out.valid); break;
    case kMember: read_members(t, out.of); break;
    case kNumber:
      for (int i = 0; i < count; ++i) out.of[i] = int32_t(t.number);
      return;
    default: __builtin_memcpy(out.of, t.side->pos, sizeof(int32_t) * size_t(count));
  }
  if (t.divide != 1 || t.modulo)
    for (int i = 0; i < count; ++i) out.of[i] = int32_t(t.formed(out.of[i]));
  else if (t.plus)  // unsigned, because the sums of an invalid call may not fit
    for (int i = 0; i < count; ++i) out.of[i] = int32_t(uint32_t(out.of[i]) + uint32_t(t.plus));
}

// The first (or last) lane that sees a key of value v: scale * v + shift. It does not overflow for any int32, whatever
// the numbers of the terms are.
struct Line {
  int64_t scale, shift;
  int64_t at(int32_t v) const { return scale * v + shift; }
};

// The comparison in one batch row and head. A missing end repeats the other one.
struct Within {
  int ends;
  TermAt kv, low, high;
  int64_t below, above;  // 1 if strict: low <= kv - below, kv + above <= high

  Within(const Op& op, const TileAt& at)
      : ends(op.ends), kv(op.kv, at, *at.kv), low(op.low, at, *at.q), high(op.high, at, *at.q) {
    below = ends & kLowStrict ? 1 : 0, above = ends & kHighStrict ? 1 : 0;
  }

  static bool is_interval(const TermAt& t) { return t.of == kNumber || t.grows(); }
  bool is_by_key() const { return low.of == kNumber && high.of == kNumber; }
  bool is_by_lanes() const { return is_interval(low) && is_interval(high); }
  bool is_by_keys() const { return kv.grows() && kv.divide == 1; }  // the value of a key determines its index
  // The number of keys to compute: the others are like the first.
  int keys() const { return kv.of == kNumber ? 1 : kv.side->count; }

  // The first lane with v + above <= high; for a number, this is 0 or beyond the last lane.
  Line first_lane() const {
    if (!(ends & kHigh)) return {0, 0};
    if (high.of == kNumber) return {kLanes, (above - high.number) * kLanes};
    return {high.divide, (above - high.plus) * high.divide - high.first()};
  }
  // One past the last lane with low <= v - below.
  Line end_lane() const {
    if (!(ends & kLow)) return {0, kLanes};
    if (low.of == kNumber) return {kLanes, (1 - below - low.number) * kLanes};
    return {low.divide, (1 - below - low.plus) * low.divide - low.first()};
  }
};

// Each key is seen by all queries or by none.
static void write_by_key(const Within& w, const Values<kKeys>& keys, Row* out) {
  const Line from = w.first_lane(), to = w.end_lane();
  for (int s = 0; s < w.keys(); ++s)
    fill_row(out[s], keys.valid[s] & -int((from.at(keys.of[s]) <= 0) & (to.at(keys.of[s]) > 0)));
}

// The terms of the queries increase from lane to lane: each key is seen by an interval of lanes.
static void write_by_lanes(const Within& w, const Values<kKeys>& keys, Row* out) {
  const Line from = w.first_lane(), to = w.end_lane();
  for (int s = 0; s < w.keys(); ++s) fill_lanes(out[s], from.at(keys.of[s]), keys.valid[s] ? to.at(keys.of[s]) : 0);
}

// The index of the key with a value, for keys whose values count up from `first`. The values of keys fit int32, also
// one below and one above them. Indices are bytes, because a tile has fewer than 256 keys, and comparing bytes takes a
// quarter of the time.
static void number_keys(const int32_t* __restrict values, int64_t first, int count, uint8_t* __restrict out) {
  const int32_t lo = int32_t(first), hi = int32_t(first + count);
  for (int i = 0; i < kLanes; ++i) out[i] = uint8_t(uint32_t(greater(lo, lesser(hi, values[i]))) - uint32_t(lo));
}

// The values of the keys count up: each query sees an interval of keys.
static void write_by_keys(const Within& w, const Values<kLanes>& low, const Values<kLanes>& high, Row* out) {
  uint8_t from[kLanes], to[kLanes], width[kLanes];
  const int count = w.kv.side->count;
  const int64_t first = w.kv.first() + w.kv.plus;
  __builtin_memset(from, 0, kLanes);
  __builtin_memset(to, count, kLanes);
  if (w.ends & kLow) number_keys(low.of, first - w.below, count, from);
  if (w.ends & kHigh) number_keys(high.of, first - 1 + w.above, count, to);
  for (int i = 0; i < kLanes; ++i) width[i] = uint8_t(greater(from[i], to[i]) - from[i]) & low.valid[i] & high.valid[i];
  for (int s = 0; s < count; ++s)
    for (int i = 0; i < kLanes; ++i) out[s][i] = uint8_t(uint8_t(s) - from[i]) < width[i] ? 0xFF : 0;
}

template <int ENDS>
static inline void compare_lanes(uint8_t* __restrict row, const int32_t* __restrict low, const int32_t* __restrict high,
                                 int32_t most, int32_t least) {
  for (int i = 0; i < kLanes; ++i) {
    if (ENDS & kSame)
      row[i] = low[i] == most ? 0xFF : 0;
    else
      row[i] = (!(ENDS & kLow) | (low[i] <= most)) & (!(ENDS & kHigh) | (least <= high[i])) ? 0xFF : 0;
  }
}

// Compares every pair; only a key with the value of the previous key copies its row.
template <int ENDS>
static void write_pairs(const Within& w, const Values<kLanes>& low, const Values<kLanes>& high,
                        const Values<kKeys>& keys, Row* out) {
  const bool checks = w.low.term->valid != kAnyEntry || w.high.term->valid != kAnyEntry;
  for (int s = 0; s < w.keys(); ++s) {
    const int64_t least = keys.of[s] + w.above, most = keys.of[s] - w.below;
    uint8_t* __restrict row = out[s];
    if (s && keys.of[s] == keys.of[s - 1] && keys.valid[s] == keys.valid[s - 1]) {
      __builtin_memcpy(row, out[s - 1], kLanes);
    } else if (!keys.valid[s] || least > INT32_MAX || most < INT32_MIN) {
      fill_row(row, 0);
    } else {
      compare_lanes<ENDS>(row, low.of, high.of, int32_t(most), int32_t(least));
      for (int i = 0; checks && i < kLanes; ++i) row[i] &= low.valid[i] & high.valid[i];
    }
  }
}

template <int ENDS>
static void write_ends(const Within& w, const Values<kKeys>& keys, Row* out) {
  Values<kLanes> low, other;
  read_values(w.low, low);
  if (ENDS == (kLow | kHigh)) read_values(w.high, other);
  const Values<kLanes>& high = ENDS == (kLow | kHigh) ? other : low;
  if (w.is_by_keys())
    write_by_keys(w, low, high, out);
  else
    write_pairs<ENDS>(w, low, high, keys, out);
}

static void write_within(const Op& op, const TileAt& at, Row* out) {
  const Within w(op, at);
  Values<kKeys> keys;
  read_values(w.kv, keys);
  if (w.is_by_key())
    write_by_key(w, keys, out);
  else if (w.is_by_lanes())
    write_by_lanes(w, keys, out);
  else if (op.ends & kSame)
    write_ends<kLow | kHigh | kSame>(w, keys, out);
  else if (!(op.ends & kHigh))
    write_ends<kLow>(w, keys, out);
  else if (!(op.ends & kLow))
    write_ends<kHigh>(w, keys, out);
  else
    write_ends<kLow | kHigh>(w, keys, out);
  for (int s = w.keys(); s < at.kv->count; ++s) __builtin_memcpy(out[s], out[0], kLanes);
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
