// A random call: shapes, inputs, a layout and a mask, and the allowed pairs one by one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "../program.h"

using namespace longspan;

namespace {

std::mt19937 rng(1);
int64_t pick(int64_t lo, int64_t hi) { return lo + int64_t(rng() % uint64_t(hi - lo + 1)); }
bool chance(double p) { return double(rng()) / 4294967296.0 < p; }
double normal() { return std::normal_distribution<double>()(rng); }

int64_t size_of(Type type) { return type == U8 ? 1 : type == F64 ? 8 : type == BF16 || type == F16 ? 2 : 4; }

// Storage for the arrays of a call, of exactly their size, so that AddressSanitizer detects every access outside.
struct Store {
  std::vector<std::unique_ptr<char[]>> all;
  template <class E> E* make(int64_t n) {
    all.emplace_back(new char[sizeof(E) * size_t(n) + (n == 0)]);
    return reinterpret_cast<E*>(all.back().get());
  }
  Array array(Type type, std::initializer_list<int64_t> dims) {
    Array a;
    a.type = type;
    int64_t n = 1;
    for (int64_t d : dims) a.dims[a.rank++] = d, n *= d;
    a.data = make<char>(n * size_of(type));
    return a;
  }
};

int64_t count_of(const Array& a) {
  int64_t n = 1;
  for (int i = 0; i < a.rank; ++i) n *= a.dims[i];
  return n;
}
// The index of an element in an array that is broadcast to [B,N,T,S].
int64_t broadcast_at(const Array& a, int64_t b, int64_t n, int64_t t, int64_t s) {
  const int64_t at[4] = {b, n, t, s};
  int64_t i = 0;
  for (int axis = 0; axis < 4; ++axis) i = i * a.dims[axis] + (a.dims[axis] > 1 ? at[axis] : 0);
  return i;
}
float bf16_to_float(uint16_t h) {
  uint32_t u = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
uint16_t float_to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
double half_to_double(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double x = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -x : x;
}
double get(const Array& a, int64_t i) {
  switch (a.type) {
    case F32: return static_cast<const float*>(a.data)[i];
    case F64: return static_cast<const double*>(a.data)[i];
    case BF16: return bf16_to_float(static_cast<const uint16_t*>(a.data)[i]);
    case F16: return half_to_double(static_cast<const uint16_t*>(a.data)[i]);
    case I32: return static_cast<const int32_t*>(a.data)[i];
    case U32: return static_cast<const uint32_t*>(a.data)[i];
    default: return static_cast<const uint8_t*>(a.data)[i];
  }
}
uint16_t double_to_half(double x) {  // nearest by search among the finite values, good enough for tests
  if (std::isnan(x)) return 0x7E00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (std::isinf(x)) return sign | 0x7C00;
  int lo = 0, hi = 0x7BFF;
  while (lo < hi) {
    const int mid = (lo + hi + 1) / 2;
    if (half_to_double(uint16_t(mid)) <= x)
      lo = mid;
    else
      hi = mid - 1;
  }
  return uint16_t(sign | lo);
}
void set(const Array& a, int64_t i, double x) {
  void* p = const_cast<void*>(a.data);
  switch (a.type) {
    case F32: static_cast<float*>(p)[i] = float(x); break;
    case F64: static_cast<double*>(p)[i] = x; break;
    case BF16: static_cast<uint16_t*>(p)[i] = std::isnan(x) ? 0x7FC0 : float_to_bf16(float(x)); break;
    case F16: static_cast<uint16_t*>(p)[i] = double_to_half(x); break;
    case I32: static_cast<int32_t*>(p)[i] = int32_t(x); break;
    case U32: static_cast<uint32_t*>(p)[i] = uint32_t(x); break;
    default: static_cast<uint8_t*>(p)[i] = uint8_t(x);
  }
}

typedef std::function<bool(int64_t b, int64_t n, int64_t t, int64_t s)> Rule;
typedef std::function<std::optional<int64_t>(int64_t b, int64_t n, int64_t i)> Value;  // of a token; empty: not valid
typedef std::function<int64_t(int64_t b)> PerRow;

// A number of a program, and its words.
struct Said {
  std::vector<int32_t> words;
  PerRow at;
};

// The value of a term from its source; modulo 0 is none.
struct Form {
  Said divide, modulo, plus;
};

// One random call with its naive evaluation.
struct Case {
  Store store;
  Call call;
  int64_t B, T, S, N, K, H, Hv;
  Type type;
  std::vector<int32_t> q_pos, kv_pos;  // by slot, for batch row 0 (shared by all rows unless given per row)
  Rule rule;
  double far = 0.15;           // the share of numbers that have the maximum size
  std::vector<double> weight;  // [B,N,T,S]: how often a pair counts

  int64_t qp(int64_t b, int64_t t) const { return position(kQPos, b, t, T); }
  int64_t kp(int64_t b, int64_t s) const { return position(kKvPos, b, s, S); }
  int64_t position(Role r, int64_t b, int64_t i, int64_t length) const {
    if (call.roles[r] < 0) return i;
    const Array& a = call.rest[size_t(call.roles[r])];
    return int64_t(get(a, (a.dims[0] > 1 ? b * length : 0) + i));
  }
  const Array* given(Role r) const { return call.roles[r] < 0 ? nullptr : &call.rest[size_t(call.roles[r])]; }
  int64_t distance(int64_t b, int64_t t, int64_t s) const { return std::abs(kp(b, s) - qp(b, t)); }
  int64_t table_at(int64_t b, int64_t n, int64_t t, int64_t s) const {
    const int64_t width = given(kTable)->dims[1], reach = width / 2, ahead = kp(b, s) - qp(b, t);
    return n * width + reach + std::max(-reach, std::min(reach, ahead));
  }
  double bias(int64_t b, int64_t n, int64_t t, int64_t s) const {
    double x = 0;
    if (const Array* a = given(kBias)) x += get(*a, broadcast_at(*a, b, n, t, s));
    if (const Array* a = given(kTable)) x += get(*a, table_at(b, n, t, s));
    if (const Array* a = given(kSlopes)) x -= get(*a, n) * double(distance(b, t, s));
    return x;
  }
  int add(const Array& a) { return call.rest.push_back(a), int(call.rest.size()) - 1; }
  void words(std::initializer_list<int64_t> w) {
    for (int64_t x : w) call.program.push_back(int32_t(x));
  }

  PerRow literal(int64_t x) {
    return words({0, x}), [x](int64_t) { return x; };
  }
  PerRow number(int64_t lo, int64_t hi) {
    const auto one = [&] { return chance(far) ? (chance(0.5) ? lo : hi) : pick(lo, hi); };
    if (chance(0.5)) return literal(one());
    const Array a = store.array(I32, {B});
    for (int64_t b = 0; b < B; ++b) set(a, b, double(one()));
    words({1, add(a)});
    return [a](int64_t b) { return int64_t(get(a, b)); };
  }

  // A mask of random words, and the pairs that it allows: masks.h.
  Rule leaf();
  Rule tree(int depth, bool heads);
  Rule comparison();
  Said said(double neutral_chance, int64_t neutral, int64_t lo, int64_t hi);
  Said plus();
  Form form();
  Value term(bool keys, int64_t of, const Form& form);
  Value array(bool keys, int64_t valid, bool clipped);
  Value members(bool keys);
  Rule blocks();
  Rule dense();
  Rule dense_at();
  Rule bits();
  void make_layout();
  void make_inputs();
  void make_garbage();
  Call stacked();
};

// Visits every tile, or random intervals and columns; a tile listed twice counts twice.
void Case::make_layout() {
  call.q_tile = chance(0.3) ? pick(1, 8) : pick(9, 150);
  call.kv_tile = chance(0.3) ? pick(1, 8) : pick(9, 150);
  const int64_t nq = (T + call.q_tile - 1) / call.q_tile, nkv = (S + call.kv_tile - 1) / call.kv_tile;
  const int64_t bl = chance(0.3) ? B : 1, nl = chance(0.3) ? N : 1, P = chance(0.5) ? 1 : pick(0, 3);
  call.starts = store.array(I32, {bl, nl, nq, P});
  call.stops = store.array(I32, {bl, nl, nq, P});
  const bool everything = chance(0.5);
  const bool columns = chance(0.3);
  for (int64_t i = 0; i < bl * nl * nq * P; ++i) {
    const int64_t a = everything && i % P == 0 ? 0 : pick(0, nkv), z = everything && i % P == 0 ? nkv : pick(0, nkv);
    set(call.starts, i, double(a));
    set(call.stops, i, double(z));
  }
  if (columns) {
    const int64_t C = pick(0, nkv);
    const Array list = store.array(I32, {bl, nl, C}), n = store.array(I32, {bl, nl});
    for (int64_t row = 0; row < bl * nl; ++row) {
      std::vector<int64_t> tiles;
      for (int64_t x = 0; x < nkv; ++x)
        if (int64_t(tiles.size()) < C && chance(0.4)) tiles.push_back(x);
      for (int64_t j = 0; j < C; ++j) set(list, row * C + j, j < int64_t(tiles.size()) ? double(tiles[size_t(j)]) : 0);
      set(n, row, double(tiles.size()));
    }
    call.roles[kColumns] = add(list);
    call.roles[kColumnCount] = add(n);
  }
  weight.assign(size_t(B * N * T * S), 0);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < N; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = (bl > 1 ? b : 0) * nl + (nl > 1 ? h : 0), at = row * nq + t / call.q_tile;
        for (int64_t s = 0; s < S; ++s) {
          double& w = weight[size_t(((b * N + h) * T + t) * S + s)];
          for (int64_t j = 0; j < P; ++j) {
            const int64_t tile = s / call.kv_tile;
            if (tile >= int64_t(get(call.starts, at * P + j)) && tile < int64_t(get(call.stops, at * P + j))) ++w;
          }
          if (w == 0 && columns) {
            const Array &list = call.rest[size_t(call.roles[kColumns])],
                        &n = call.rest[size_t(call.roles[kColumnCount])];
            for (int64_t j = 0; j < int64_t(get(n, row)); ++j)
              if (int64_t(get(list, row * list.dims[2] + j)) == s / call.kv_tile) w = 1;
          }
        }
      }
}

void Case::make_inputs() {
  const Type kinds[] = {F32, F32, F32, BF16, F16, F64};
  type = kinds[pick(0, 5)];
  const int64_t heads[][2] = {{1, 1}, {2, 1}, {4, 2}, {3, 3}, {6, 2}, {12, 3}};
  const auto& h = heads[pick(0, 5)];
  B = pick(1, 2), N = h[0], K = h[1];
  H = chance(0.3) ? pick(1, 9) : chance(0.2) ? pick(100, 256) : pick(10, 80);
  Hv = chance(0.6) ? H : pick(1, 100);
  T = chance(0.2) ? 1 : chance(0.3) ? pick(2, 20) : pick(20, 200);
  S = chance(0.15) ? pick(1, 9) : pick(10, 260);
  if (T == 1 && chance(0.5)) S = pick(2000, 5000);
  call.roles.assign(kRoles, -1);
  call.q = store.array(type, {B, T, N, H});
  call.k = store.array(type, {B, S, K, H});
  call.v = store.array(type, {B, S, K, Hv});
  for (const Array* a : {&call.q, &call.k, &call.v})
    for (int64_t i = 0; i < count_of(*a); ++i) set(*a, i, normal());
  call.scale = 1 / std::sqrt(double(H)) * (chance(0.3) ? 3 : 1);
  if (chance(0.3)) call.soft_cap = 2.5;
  call.by_tiles = chance(0.5);
  for (int side = 0; side < 2; ++side)
    if (chance(0.3)) {
      const int64_t length = side ? S : T, rows = chance(0.5) ? B : 1;
      const Array a = store.array(I32, {rows, length});
      const bool shuffled = chance(0.5);
      for (int64_t i = 0, x = pick(-5, 50); i < rows * length; ++i)
        set(a, i, double(shuffled ? pick(-3, length) : x++));
      call.roles[side ? kKvPos : kQPos] = add(a);
    }
  if (chance(0.3)) {
    const Array a = store.array(type == F64 ? F64 : F32, {N});
    for (int64_t i = 0; i < N; ++i) set(a, i, chance(0.1) ? -INFINITY : normal());
    call.roles[kSinks] = add(a);
  }
  if (chance(0.35)) {
    const Array a = store.array(kinds[pick(0, 5)],
                                {chance(0.5) ? B : 1, chance(0.5) ? N : 1, chance(0.6) ? T : 1, chance(0.7) ? S : 1});
    for (int64_t i = 0; i < count_of(a); ++i) set(a, i, chance(0.1) ? -INFINITY : normal());
    call.roles[kBias] = add(a);
  }
  if (chance(0.25)) {
    const Array a = store.array(type == F64 ? F64 : F32, {N, 2 * pick(0, 30) + 1});
    for (int64_t i = 0; i < count_of(a); ++i) set(a, i, chance(0.1) ? -INFINITY : normal());
    call.roles[kTable] = add(a);
  }
  if (chance(0.25)) {
    const Array a = store.array(type == F64 ? F64 : F32, {N});
    for (int64_t i = 0; i < N; ++i) set(a, i, 0.05 * normal());
    call.roles[kSlopes] = add(a);
  }
  if (chance(0.3)) {
    const Array a = store.array(U32, {2});
    set(a, 0, rng());
    set(a, 1, rng());
    call.roles[kSeed] = add(a);
    call.dropout_rate = 0.3;
    call.dropout_threshold = uint32_t(0.3 * 4294967296.0);
  }
}

// The same call with its keys and values as one layer of a stack, in either order; the other layers are NaN.
Call Case::stacked() {
  Call of = call;
  of.heads_first = chance(0.5);
  const int64_t layers = pick(1, 3), layer = pick(0, layers - 1);
  for (Array* a : {&of.k, &of.v}) {
    const Array one = *a;
    const int64_t size = one.dims[3], count = count_of(one);
    *a = store.array(type, {layers, B, of.heads_first ? K : S, of.heads_first ? S : K, size});
    for (int64_t i = 0; i < layers * count; ++i) set(*a, i, NAN);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t h = i % size, n = i / size % K, s = i / size / K % S, b = i / size / K / S;
      const int64_t row = of.heads_first ? (b * K + n) * S + s : (b * S + s) * K + n;
      set(*a, layer * count + row * size + h, get(one, i));
    }
  }
  const Array which = store.array(I32, {});
  set(which, 0, double(layer));
  of.roles[kLayer] = int32_t(of.rest.size());
  of.rest.push_back(which);
  return of;
}

// Writes NaN into keys that no query sees and into queries that see no key.
void Case::make_garbage() {
  const int64_t G = N / K;
  for (int64_t i = 0; i < B * N * T * S; ++i) {
    const int64_t s = i % S, t = i / S % T, n = i / S / T % N, b = i / S / T / N;
    if (weight[size_t(i)] == 0) continue;
    if (!rule(b, n, t, s) || bias(b, n, t, s) == -INFINITY) weight[size_t(i)] = 0;
  }
  std::vector<bool> key(size_t(B * K * S)), query(size_t(B * N * T));
  for (int64_t i = 0; i < B * N * T * S; ++i)
    if (weight[size_t(i)] > 0) {
      const int64_t s = i % S, t = i / S % T, n = i / S / T % N, b = i / S / T / N;
      key[size_t((b * K + n / G) * S + s)] = true;
      query[size_t((b * N + n) * T + t)] = true;
    }
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t n = 0; n < K; ++n)
      for (int64_t s = 0; s < S; ++s)
        if (!key[size_t((b * K + n) * S + s)]) {
          const int64_t at = (b * S + s) * K + n;
          for (int64_t h = 0; h < H; ++h) set(call.k, at * H + h, NAN);
          for (int64_t h = 0; h < Hv; ++h) set(call.v, at * Hv + h, chance(0.5) ? NAN : INFINITY);
        }
    for (int64_t n = 0; n < N; ++n)
      for (int64_t t = 0; t < T; ++t)
        if (!query[size_t((b * N + n) * T + t)])
          for (int64_t h = 0; h < H; ++h) set(call.q, ((b * T + t) * N + n) * H + h, NAN);
  }
}

}  // namespace
