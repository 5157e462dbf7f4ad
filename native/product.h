// y = x W for a few rows of x. Every number of W is used only a few times, so the time is that of reading W. All
// threads read it in long runs of addresses, with prefetching and without copies.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "problem.h"
#include "simd.h"

namespace longspan::LONGSPAN_ISA {
namespace {

constexpr int kDeep = 8;       // rows of W that are read at once
constexpr int64_t kLine = 64;  // bytes of a cache line

// Reads numbers of W, a vector or one at a time.
struct Singles {
  typedef float Word;
  static inline Vec<float> vector(const float* p) { return loose(p); }
  static inline float one(const float* p) { return *p; }
};

struct Halves {
  typedef uint16_t Word;
  typedef uint16_t Loose __attribute__((vector_size(kVectorBytes / 2), may_alias, aligned(2)));
  static inline Vec<float> vector(const uint16_t* p) {
    typedef Simd<float>::U U;
    return (Vec<float>)(__builtin_convertvector(*reinterpret_cast<const Loose*>(p), U) << 16);
  }
  static inline float one(const uint16_t* p) {
    union {
      uint32_t bits;
      float value;
    } x;
    x.bits = uint32_t(*p) << 16;
    return x.value;
  }
};

// y[columns] += sum of DEEP rows of W, each times its x. Prefetches the next rows.
template <class W, int DEEP>
static inline __attribute__((always_inline)) void add_rows(float* __restrict y, const float* x,
                                                           const typename W::Word* w, int64_t stride, int64_t columns,
                                                           bool ahead) {
  constexpr int L = Simd<float>::lanes;
  constexpr int64_t kStep = kLine / int64_t(sizeof(typename W::Word));
  Vec<float> factor[DEEP];
  for (int i = 0; i < DEEP; ++i) factor[i] = splat(x[i]);
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep) {
    if (ahead)
      for (int i = 0; i < DEEP; ++i) __builtin_prefetch(w + (i + DEEP) * stride + c);
#pragma GCC unroll 8
    for (int64_t v = 0; v < kStep; v += L) {
      Vec<float> sum = load(y + c + v);
#pragma GCC unroll 8
      for (int i = 0; i < DEEP; ++i) sum += factor[i] * W::vector(w + i * stride + c + v);
      store(y + c + v, sum);
    }
  }
  for (; c < columns; ++c)
    for (int i = 0; i < DEEP; ++i) y[c] += x[i] * W::one(w + i * stride + c);
}

// The products with columns [first, first + columns) of W [inner, outer], in `sums` [rows, padded columns].
template <class W>
static void by_inner(const Product& p, const Matrix& m, int64_t first, int64_t columns, float* sums) {
  const typename W::Word* w = static_cast<const typename W::Word*>(m.data) + first;
  const int64_t padded = (columns + kLine - 1) / kLine * kLine;
  for (int64_t i = 0; i < p.rows * padded; ++i) sums[i] = 0;
  int64_t k = 0;
  for (; k + kDeep <= p.inner; k += kDeep) {
    const bool ahead = k + 2 * kDeep <= p.inner;
    for (int64_t b = 0; b < p.rows; ++b)
      add_rows<W, kDeep>(sums + b * padded, p.x + b * p.inner + k, w + k * m.outer, m.outer, columns, ahead && !b);
  }
  for (; k < p.inner; ++k)
    for (int64_t b = 0; b < p.rows; ++b)
      add_rows<W, 1>(sums + b * padded, p.x + b * p.inner + k, w + k * m.outer, m.outer, columns, false);
  for (int64_t b = 0; b < p.rows; ++b)
    for (int64_t c = 0; c < columns; ++c) m.y[b * m.outer + first + c] = sums[b * padded + c];
}

// The products of `COUNT` rows of W [outer, inner] with one row of x.
template <class W, int COUNT>
static inline __attribute__((always_inline)) void dot_rows(float* y, const float* x, const typename W::Word* w,
                                                           int64_t inner) {
  constexpr int L = Simd<float>::lanes;
  Vec<float> sum[COUNT] = {};
  int64_t k = 0;
  for (; k + L <= inner; k += L) {
    const Vec<float> factor = loose(x + k);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) sum[i] += factor * W::vector(w + i * inner + k);
  }
  for (int i = 0; i < COUNT; ++i) {
    float total = 0;
    for (int j = 0; j < L; ++j) total += sum[i][j];
    for (int64_t rest = k; rest < inner; ++rest) total += x[rest] * W::one(w + i * inner + rest);
    y[i] = total;
  }
}

// The products with rows [first, first + count) of W [outer, inner].
template <class W>
static void by_outer(const Product& p, const Matrix& m, int64_t first, int64_t count) {
  const typename W::Word* w = static_cast<const typename W::Word*>(m.data) + first * p.inner;
  int64_t o = 0;
  for (; o + 4 <= count; o += 4)
    for (int64_t b = 0; b < p.rows; ++b)
      dot_rows<W, 4>(m.y + b * m.outer + first + o, p.x + b * p.inner, w + o * p.inner, p.inner);
  for (; o < count; ++o)
    for (int64_t b = 0; b < p.rows; ++b)
      dot_rows<W, 1>(m.y + b * m.outer + first + o, p.x + b * p.inner, w + o * p.inner, p.inner);
}

// Splits all matrices into pieces: narrow enough to balance threads, wide enough for long runs of addresses.
class ProductJob {
 public:
  explicit ProductJob(const Product& p) : p_(p) {
    for (int64_t i = 0; i < p.count; ++i) {
      width_[i] = width_of(p.matrices[i].outer);
      pieces_[i] = (p.matrices[i].outer + width_[i] - 1) / width_[i];
      total_ += pieces_[i];
    }
  }

  bool run(Runner& runner) {
    return runner.run(
        total_, [](void* job, int64_t task, void* scratch) { static_cast<ProductJob*>(job)->piece(task, scratch); },
        this, size_t((p_.rows < kTogether ? p_.rows : kTogether) * kWidest) * sizeof(float));
  }

 private:
  static constexpr int64_t kNarrowest = 64, kWidest = 2048, kShares = 4, kTogether = 16;
  const Product& p_;
  int64_t width_[kMaxMatrices] = {}, pieces_[kMaxMatrices] = {}, total_ = 0;

  static int64_t width_of(int64_t outer) {
    const int64_t share = (outer / kShares + kNarrowest - 1) / kNarrowest * kNarrowest;
    return share < kNarrowest ? kNarrowest : share > kWidest ? kWidest : share;
  }

  void piece(int64_t task, void* scratch) {
    int64_t i = 0;
    for (; task >= pieces_[i]; ++i) task -= pieces_[i];
    Matrix m = p_.matrices[i];
    const int64_t first = task * width_[i], left = m.outer - first, count = left < width_[i] ? left : width_[i];
    for (int64_t row = 0; row < p_.rows; row += kTogether, m.y += kTogether * m.outer) {
      Product some = p_;
      some.x += row * p_.inner;
      some.rows = p_.rows - row < kTogether ? p_.rows - row : kTogether;
      m.type == BF16 ? multiply<Halves>(some, m, first, count, static_cast<float*>(scratch))
                     : multiply<Singles>(some, m, first, count, static_cast<float*>(scratch));
    }
  }

  template <class W>
  static void multiply(const Product& p, const Matrix& m, int64_t first, int64_t count, float* sums) {
    p.by_outer ? by_outer<W>(p, m, first, count) : by_inner<W>(p, m, first, count, sums);
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
