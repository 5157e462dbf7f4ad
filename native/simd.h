// The vectors of one instruction set, and the functions of the softmax on them.
#pragma once

#include <stdint.h>

#include "isa.h"

namespace longspan::LONGSPAN_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kMicroRows = 12;  // 32 registers
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kMicroRows = 6;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kMicroRows = 12;
#else
constexpr int kVectorBytes = 16;
constexpr int kMicroRows = 6;
#endif

template <class R>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int lanes = kVectorBytes / 4;
  typedef float V __attribute__((vector_size(kVectorBytes), may_alias));
  typedef int32_t I __attribute__((vector_size(kVectorBytes), may_alias));
  typedef uint32_t U __attribute__((vector_size(kVectorBytes), may_alias));
  typedef float Loose __attribute__((vector_size(kVectorBytes), may_alias, aligned(4)));
  typedef int8_t Bytes __attribute__((vector_size(lanes), may_alias, aligned(1)));
};

template <>
struct Simd<double> {
  static constexpr int lanes = kVectorBytes / 8;
  typedef double V __attribute__((vector_size(kVectorBytes), may_alias));
  typedef int64_t I __attribute__((vector_size(kVectorBytes), may_alias));
  typedef uint64_t U __attribute__((vector_size(kVectorBytes), may_alias));
  typedef double Loose __attribute__((vector_size(kVectorBytes), may_alias, aligned(8)));
  typedef int8_t Bytes __attribute__((vector_size(lanes), may_alias, aligned(1)));
};

template <class R> using Vec = typename Simd<R>::V;

template <class R> static inline Vec<R> load(const R* p) { return *reinterpret_cast<const Vec<R>*>(p); }
template <class R> static inline void store(R* p, Vec<R> x) { *reinterpret_cast<Vec<R>*>(p) = x; }
template <class R> static inline Vec<R> loose(const R* p) {
  return *reinterpret_cast<const typename Simd<R>::Loose*>(p);
}

// Lanes 0, 1, 2, ... as template arguments.
template <int... J> struct Lanes {};
template <int N> struct Upto;
template <> struct Upto<2> {
  typedef Lanes<0, 1> all;
};
template <> struct Upto<4> {
  typedef Lanes<0, 1, 2, 3> all;
};
template <> struct Upto<8> {
  typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7> all;
};
template <> struct Upto<16> {
  typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> all;
};

// As an initializer list, which compilers turn into a broadcast: GCC turns a loop over sixteen lanes into sixteen
// insertions.
template <class R, int... J> static inline Vec<R> splat(R x, Lanes<J...>) { return Vec<R>{(void(J), x)...}; }
template <class R> static inline Vec<R> splat(R x) { return splat<R>(x, typename Upto<Simd<R>::lanes>::all()); }

// The truth bytes (0 or 0xFF) of one vector's lanes as a lane mask.
template <class R> static inline typename Simd<R>::I lanes_of(const uint8_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const typename Simd<R>::Bytes*>(p), typename Simd<R>::I);
}

// Selects lanes of a and b; the indices of b's lanes follow those of a.
template <class R, int... J> static inline Vec<R> pick(Vec<R> a, Vec<R> b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, J...);
#else
  return __builtin_shuffle(a, b, typename Simd<R>::I{J...});
#endif
}

// One step of a transposition: exchanges the off-diagonal blocks of B lanes.
template <class R, int B, int... J>
static inline __attribute__((always_inline)) void exchange(Vec<R>* x, Lanes<J...>) {
  constexpr int L = sizeof...(J);
  for (int i = 0; i < L; ++i) {
    if (i & B) continue;
    const Vec<R> a = x[i], b = x[i + B];
    x[i] = pick<R, (J & B ? J - B + L : J)...>(a, b);
    x[i + B] = pick<R, (J & B ? J + L : J + B)...>(a, b);
  }
}

// Transposes as many vectors as one has lanes.
template <class R, int B = Simd<R>::lanes / 2>
static inline __attribute__((always_inline)) void transpose(Vec<R>* x) {
  exchange<R, B>(x, typename Upto<Simd<R>::lanes>::all());
  if constexpr (B > 1) transpose<R, B / 2>(x);
}

// One level of `sums`: interleaves each pair of vectors, with partial sums over half of each vector.
template <class R, int B, int... J>
static inline __attribute__((always_inline)) void fold(Vec<R>* x, Lanes<J...>) {
  constexpr int L = sizeof...(J);
  for (int i = 0; i < B; ++i)
    x[i] = pick<R, (J / 2 + J % 2 * L)...>(x[i], x[i + B]) + pick<R, (J / 2 + J % 2 * L + L / 2)...>(x[i], x[i + B]);
}

// The sums over the lanes of as many vectors as one has lanes: lane i is the sum of x[i]. It takes three operations per
// vector; a single vector would take several for every halving.
template <class R, int B = Simd<R>::lanes / 2>
static inline __attribute__((always_inline)) Vec<R> sums(Vec<R>* x) {
  fold<R, B>(x, typename Upto<Simd<R>::lanes>::all());
  if constexpr (B > 1) return sums<R, B / 2>(x);
  return x[0];
}

// The lanes that hold infinity or NaN: all bits of the exponent are set.
template <class R> static inline typename Simd<R>::I not_finite(Vec<R> x) {
  typedef typename Simd<R>::I I;
  const I exponent = (I)splat(R(__builtin_inf()));
  return ((I)x & exponent) == exponent;
}

template <class R> static inline bool any_of(typename Simd<R>::I x) {
  bool any = false;
  for (int i = 0; i < Simd<R>::lanes; ++i) any |= x[i] != 0;
  return any;
}

constexpr float kInfF = __builtin_inff();
template <class R> constexpr R kInf = R(__builtin_inf());

// exp, to about one unit in the last place; 0 below the smallest normal number; NaN stays NaN. Several vectors are
// computed at once, to hide the latency of each operation.
template <int N>
static inline __attribute__((always_inline)) void exp_each(Vec<float>* x) {
  typedef Simd<float>::I I;
  const Vec<float> magic = splat(12582912.0f), lowest = splat(-87.33f);
  I tiny[N];
  Vec<float> t[N], r[N], p[N];
  for (int i = 0; i < N; ++i) tiny[i] = x[i] < lowest;
  for (int i = 0; i < N; ++i) t[i] = x[i] * 1.44269504088896341f + magic;
  for (int i = 0; i < N; ++i) {
    const Vec<float> n = t[i] - magic;
    r[i] = x[i] - n * 0.693359375f;
    r[i] = r[i] - n * -2.12194440e-4f;
  }
  for (int i = 0; i < N; ++i) p[i] = r[i] * 1.9875691500e-4f + 1.3981999507e-3f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + 8.3334519073e-3f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + 4.1665795894e-2f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + 1.6666665459e-1f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + 5.0000001201e-1f;
  for (int i = 0; i < N; ++i) p[i] = p[i] * (r[i] * r[i]) + r[i];
  for (int i = 0; i < N; ++i) {
    // A multiplication, not an addition to the exponent bits: that would turn a NaN with a payload into a number.
    const Vec<float> power = (Vec<float>)(((I)t[i] + 127) << 23);
    // Results below the smallest normal number, and of -inf, are wrong up to here.
    x[i] = (Vec<float>)((I)((p[i] + 1.0f) * power) & ~tiny[i]);
  }
}

static inline Vec<float> vexp(Vec<float> x) {
  exp_each<1>(&x);
  return x;
}

static inline Vec<double> vexp(Vec<double> x) {
  typedef Simd<double>::I I;
  const Vec<double> magic = splat(6755399441055744.0), lowest = splat(-708.0);
  const I tiny = x < lowest;
  x = tiny ? lowest : x;
  const Vec<double> t = x * 1.4426950408889634074 + magic;
  const Vec<double> n = t - magic;
  Vec<double> r = x - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  Vec<double> p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r;
  p = p + 1.0;
  const Vec<double> power = (Vec<double>)(((I)t + 1023) << 52);
  p = p * power;
  return tiny ? splat(0.0) : p;
}

template <int N>
static inline void exp_each(Vec<double>* x) {
  for (int i = 0; i < N; ++i) x[i] = vexp(x[i]);
}

// tanh. Near zero, 1 - exp(-2x) cancels, so an odd rational/polynomial form is used there.
static inline Vec<float> vtanh(Vec<float> x) {
  const Vec<float> a = x < 0.0f ? -x : x;
  const Vec<float> z = x * x;
  Vec<float> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const Vec<float> near = p * z * x + x;
  const Vec<float> e = vexp(a * -2.0f);
  const Vec<float> far = (1.0f - e) / (1.0f + e);
  return a < 0.625f ? near : (x < 0.0f ? -far : far);
}

static inline Vec<double> vtanh(Vec<double> x) {
  const Vec<double> a = x < 0.0 ? -x : x;
  const Vec<double> z = x * x;
  Vec<double> p = z * -9.64399179425052238628e-1 + -9.92877231001918586564e1;
  p = p * z + -1.61468768441708447952e3;
  Vec<double> q = z + 1.12811678491632931402e2;
  q = q * z + 2.23548839060100448583e3;
  q = q * z + 4.84406305325125486048e3;
  const Vec<double> near = x + x * z * (p / q);
  const Vec<double> e = vexp(a * -2.0);
  const Vec<double> far = (1.0 - e) / (1.0 + e);
  return a < 0.625 ? near : (x < 0.0 ? -far : far);
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
