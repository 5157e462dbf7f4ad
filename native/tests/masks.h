// The words of random masks, and the allowed pairs one by one, by comparisons in int64 without tiles.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "case.h"

namespace {

constexpr int64_t kFar = (int64_t(1) << 30) - 1;  // the maximum of numbers and positions

int64_t rounded_down(int64_t a, int64_t b) { return a / b - (a % b < 0); }
int64_t some_extreme() {
  const int64_t all[] = {INT32_MIN, INT32_MIN + 1, -kFar, -1, 0, 1, kFar, INT32_MAX - 1, INT32_MAX};
  return all[pick(0, 8)];
}

Said Case::said(double neutral_chance, int64_t neutral, int64_t lo, int64_t hi) {
  std::vector<int32_t> own;
  std::swap(own, call.program);
  const PerRow at = chance(neutral_chance) ? literal(neutral) : number(lo, hi);
  std::swap(own, call.program);
  return {own, at};
}

Said Case::plus() {
  const int64_t reach = chance(far) ? kFar : std::max(T, S);
  return said(0.5, 0, -reach, reach);
}

Form Case::form() {
  const int64_t reach = std::max(T, S);
  const Said divide = said(0.65, 1, 1, chance(far) ? kFar : reach);
  return {divide, said(0.7, 0, 1, chance(0.7) ? 4 : chance(0.5) ? reach : kFar), plus()};
}

// Ids in runs, ends of intervals, or extreme values of int32.
Value Case::array(bool keys, int64_t valid, bool clipped) {
  const int64_t L = keys ? S : T, by_head = chance(0.4), rows = chance(0.5) ? B : 1;
  const int64_t heads = by_head && chance(0.7) ? N : 1, what = chance(far) ? 2 : pick(0, 3),
                run = chance(0.3) ? 1 : pick(1, 40);
  const Type type = what == 3 ? U8 : I32;
  const Array a = by_head ? store.array(type, {rows, heads, L}) : store.array(type, {rows, L});
  for (int64_t i = 0, x = 0; i < count_of(a); ++i) {
    if (i % run == 0)
      x = what == 0 ? pick(-1, 3) : what == 1 ? pick(-5, S + 5) : what == 2 ? some_extreme() : pick(0, 1);
    set(a, i, double(clipped ? std::max(-kFar, std::min(kFar, x)) : x));
  }
  words({add(a)});
  return [=](int64_t b, int64_t n, int64_t i) -> std::optional<int64_t> {
    const int64_t x = int64_t(get(a, ((rows > 1 ? b : 0) * heads + (heads > 1 ? n : 0)) * L + i));
    if (valid == kNotNegative ? x < 0 : valid == kNotZero && x == 0) return std::nullopt;
    return x;
  };
}

Value Case::members(bool keys) {
  const int64_t m = pick(0, 40), step = chance(0.3) ? 1 : 9;
  const Array a = store.array(I32, {m});
  for (int64_t i = 0, x = pick(-9, 9) + (keys ? kp(0, 0) : qp(0, 0)); i < m; ++i) set(a, i, double(x += pick(1, step)));
  words({add(a)});
  return [=](int64_t b, int64_t, int64_t i) {
    int64_t found = 0;
    for (int64_t j = 0; j < m; ++j) found |= int64_t(get(a, j)) == (keys ? kp(b, i) : qp(b, i));
    return found;
  };
}

Value Case::term(bool keys, int64_t of, const Form& form) {
  const int64_t reach = chance(far) ? kFar : std::max(T, S), valid = of == kArray ? pick(0, 2) : int64_t(kAnyEntry);
  words({of, valid});
  Value source;
  if (of == kArray) source = array(keys, valid, form.plus.words != std::vector<int32_t>{0, 0});
  if (of == kMember) source = members(keys);
  if (of == kNumber) source = [x = number(-reach, reach)](int64_t b, int64_t, int64_t) { return x(b); };
  if (of == kSlot) source = [](int64_t, int64_t, int64_t i) { return i; };
  if (of == kPosition) source = [=](int64_t b, int64_t, int64_t i) { return keys ? kp(b, i) : qp(b, i); };
  for (const Said* number : {&form.divide, &form.modulo, &form.plus})
    call.program.insert(call.program.end(), number->words.begin(), number->words.end());
  return [=, divide = form.divide.at, modulo = form.modulo.at, plus = form.plus.at](
             int64_t b, int64_t n, int64_t i) -> std::optional<int64_t> {
    const std::optional<int64_t> entry = source(b, n, i);
    if (!entry) return std::nullopt;
    int64_t x = rounded_down(*entry, divide(b));
    if (modulo(b)) x -= rounded_down(x, modulo(b)) * modulo(b);
    return x + plus(b);
  };
}

// Random terms are seldom residues of places, or an interval of places for each query: some are chosen deliberately.
Rule Case::comparison() {
  const int64_t which[] = {kLow, kHigh, kLow | kHigh, kLow | kHigh | kSame};
  const bool residues = chance(0.1), intervals = !residues && chance(0.15);
  int64_t ends = residues ? which[3] : intervals ? which[2] : which[pick(0, 3)];
  if (!(ends & kSame))
    ends |= (ends & kLow && chance(0.4) ? kLowStrict : 0) | (ends & kHigh && chance(0.4) ? kHighStrict : 0);
  words({kWithin, ends});
  const int64_t of = residues || intervals || chance(0.5) ? pick(kPosition, kSlot) : pick(0, kSources - 1);
  const int64_t of_queries = intervals ? int64_t(kArray) : residues || chance(0.5) ? of : pick(0, kSources - 1);
  Form keys = form();
  if (residues || intervals) keys.divide = said(1, 1, 1, 1), keys.modulo = said(intervals, 0, 1, 5);
  const auto query = [&] {
    Form own = residues || chance(0.7) ? keys : form();
    if (!residues && chance(0.5)) own.plus = plus();
    return term(false, residues || chance(0.8) ? of_queries : pick(0, kSources - 1), own);
  };
  const Value kv = term(true, of, keys), low = ends & kLow ? query() : Value();
  const Value high = ends & kSame ? low : ends & kHigh ? query() : Value();
  return [=](int64_t b, int64_t n, int64_t t, int64_t s) {
    const std::optional<int64_t> k = kv(b, n, s), a = low ? low(b, n, t) : k, z = high ? high(b, n, t) : k;
    if (!k || !a || !z) return false;
    return (ends & kLowStrict ? *a < *k : *a <= *k) && (ends & kHighStrict ? *k < *z : *k <= *z);
  };
}

Rule Case::blocks() {
  const int64_t block = pick(1, 40), rows = (T + block - 1) / block, r = pick(0, 3);
  const int64_t heads = chance(0.5) ? N : 1, batch = chance(0.35) ? B : 1;
  const Array table = store.array(I32, {batch, heads, rows, r});
  for (int64_t i = 0; i < count_of(table); ++i) set(table, i, double(pick(-1, S / block)));
  words({kBlocks, add(table), block});
  return [=](int64_t b, int64_t n, int64_t t, int64_t s) {
    const int64_t head = (batch > 1 ? b : 0) * heads + (heads > 1 ? n : 0);
    for (int64_t j = 0; j < r; ++j)
      if (int64_t(get(table, (head * rows + t / block) * r + j)) == s / block) return true;
    return false;
  };
}

Rule Case::dense() {
  const Array f = store.array(U8, {chance(0.5) ? B : 1, chance(0.5) ? N : 1, chance(0.7) ? T : 1, chance(0.7) ? S : 1});
  for (int64_t i = 0; i < count_of(f); ++i) set(f, i, chance(0.5));
  words({kDense, add(f)});
  return [=](int64_t b, int64_t n, int64_t t, int64_t s) { return get(f, broadcast_at(f, b, n, t, s)) != 0; };
}

Rule Case::dense_at() {
  const int64_t sides = pick(0, 3);
  const Array f = store.array(U8, {chance(0.5) ? B : 1, chance(0.5) ? N : 1, sides & 1 ? pick(0, T + 2) : T,
                                   sides & 2     ? pick(0, S + 2)
                                   : chance(0.7) ? S
                                                 : 1});
  for (int64_t i = 0; i < count_of(f); ++i) set(f, i, chance(0.5));
  words({kDenseAt, sides, add(f)});
  auto q = number(-2, T), kv = number(-2, S);
  return [=](int64_t b, int64_t n, int64_t t, int64_t s) {
    const int64_t x = sides & 1 ? t - q(b) : t, y = sides & 2 ? s - kv(b) : s;
    const bool inside = (!(sides & 1) || (x >= 0 && x < f.dims[2])) && (!(sides & 2) || (y >= 0 && y < f.dims[3]));
    return inside && get(f, broadcast_at(f, b, n, x, y)) != 0;
  };
}

// A hash of the slots, stored for visited tiles only.
Rule Case::bits() {
  const Array& a = call.starts;
  const int64_t bl = a.dims[0], nl = a.dims[1], nq = a.dims[2], P = a.dims[3],
                nkv = (S + call.kv_tile - 1) / call.kv_tile;
  const int64_t stride = (call.kv_tile + 7) / 8;
  const uint32_t salt = uint32_t(rng());
  auto truth = [=](int64_t b, int64_t n, int64_t t, int64_t s) {
    uint32_t x = salt + uint32_t(bl > 1 ? b : 0) * 77u + uint32_t(nl > 1 ? n : 0) * 991u + uint32_t(t) * 7919u +
                 uint32_t(s) * 104729u;
    x ^= x >> 15, x *= 2654435761u, x ^= x >> 13;
    return x % 3 != 0;
  };
  std::vector<std::vector<int64_t>> visits(size_t(bl * nl * nq));
  size_t most = 1;
  for (int64_t row = 0; row < bl * nl; ++row)
    for (int64_t i = 0; i < nq; ++i) {
      auto& list = visits[size_t(row * nq + i)];
      for (int64_t j = 0; j < P; ++j)
        for (int64_t x = std::max<int64_t>(0, int64_t(get(a, (row * nq + i) * P + j)));
             x < std::min(nkv, int64_t(get(call.stops, (row * nq + i) * P + j))); ++x)
          list.push_back(x);
      const std::vector<int64_t> inside = list;
      if (call.roles[kColumns] >= 0) {
        const Array &c = call.rest[size_t(call.roles[kColumns])], &n = call.rest[size_t(call.roles[kColumnCount])];
        for (int64_t j = 0; j < int64_t(get(n, row)); ++j) {
          const int64_t x = int64_t(get(c, row * c.dims[2] + j));
          if (std::find(inside.begin(), inside.end(), x) == inside.end()) list.push_back(x);
        }
      }
      most = std::max(most, list.size());
    }
  const Array bits = store.array(U8, {bl, nl, nq, int64_t(most), call.q_tile, stride});
  uint8_t* bytes = static_cast<uint8_t*>(const_cast<void*>(bits.data));
  std::memset(bytes, 0, size_t(count_of(bits)));
  for (int64_t row = 0; row < bl * nl; ++row)
    for (int64_t i = 0; i < nq; ++i)
      for (size_t e = 0; e < visits[size_t(row * nq + i)].size(); ++e)
        for (int64_t t = 0; t < call.q_tile; ++t) {
          uint8_t* out = bytes + (((row * nq + i) * int64_t(most) + int64_t(e)) * call.q_tile + t) * stride;
          for (int64_t s = 0; s < call.kv_tile; ++s)
            if (truth(row / nl, row % nl, i * call.q_tile + t, visits[size_t(row * nq + i)][e] * call.kv_tile + s))
              out[s / 8] |= uint8_t(1 << s % 8);
        }
  words({kBits, add(bits)});
  return truth;
}

Rule Case::leaf() {
  switch (pick(0, 15)) {
    case 0: return words({kFull}), [](auto...) { return true; };
    case 1: return words({kEmpty}), [](auto...) { return false; };
    case 2: return blocks();
    case 3: return dense();
    case 4: return dense_at();
    case 5: return bits();
    default: return comparison();
  }
}

Rule Case::tree(int depth, bool heads) {
  if (depth == 0 || chance(0.3)) return leaf();
  if (heads && chance(0.2)) {
    std::vector<Rule> parts;
    std::vector<int32_t> before = call.program, body, lengths;
    for (int64_t n = 0; n < N; ++n) {
      call.program.clear();
      parts.push_back(tree(depth - 1, false));
      lengths.push_back(int32_t(call.program.size()));
      body.insert(body.end(), call.program.begin(), call.program.end());
    }
    call.program = before;
    words({kPerHead, N});
    call.program.insert(call.program.end(), lengths.begin(), lengths.end());
    call.program.insert(call.program.end(), body.begin(), body.end());
    return [parts](int64_t b, int64_t n, int64_t t, int64_t s) { return parts[size_t(n)](b, n, t, s); };
  }
  if (chance(0.15)) {
    Rule a = tree(depth - 1, heads);
    words({kNot});
    return [a](int64_t b, int64_t n, int64_t t, int64_t s) { return !a(b, n, t, s); };
  }
  const bool both = chance(0.5);
  Rule a = tree(depth - 1, heads), c = tree(depth - 1, heads);
  words({both ? kAnd : kOr});
  return [=](int64_t b, int64_t n, int64_t t, int64_t s) {
    const bool x = a(b, n, t, s), y = c(b, n, t, s);
    return both ? x && y : x || y;
  };
}

}  // namespace
