// The micro-kernel of all seven matrix products: C[m, lanes] (+)= sum_k A(m, k) * B[k, lanes].
//
// Each lane is a query (or a head element, for dk and dv), so B and C are rows of vectors. A is read one scalar at a
// time and broadcast, so K and V need no transposition:
// with COLUMNS false A(m, k) = a[m * as + k] (scores: m is a key),
// with COLUMNS true A(m, k) = a[k * as + m] (outputs: m is a head element, k a key).
#pragma once

#include <stdint.h>

#include "isa.h"
#include "simd.h"

namespace longspan::LONGSPAN_ISA {
namespace {

enum Mode { kStore, kAdd, kScaleAdd };  // C = AB; C += AB; C = C * alpha + AB with one alpha per lane

template <class R, int MR, int NV, bool COLUMNS, Mode MODE>
static inline __attribute__((always_inline)) void micro(int64_t kd, const R* __restrict a, int64_t as,
                                                        const R* __restrict b, int64_t ldb, R* __restrict c,
                                                        int64_t ldc, const R* alpha) {
  constexpr int L = Simd<R>::lanes;
  Vec<R> acc[MR][NV];
#pragma GCC unroll 24
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      if constexpr (MODE == kStore) acc[i][j] = Vec<R>{};
      if constexpr (MODE == kAdd) acc[i][j] = load(c + i * ldc + j * L);
      if constexpr (MODE == kScaleAdd) acc[i][j] = load(c + i * ldc + j * L) * load(alpha + j * L);
    }
#pragma GCC unroll 2
  for (int64_t k = 0; k < kd; ++k) {
    Vec<R> bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = load(b + k * ldb + j * L);
#pragma GCC unroll 24
    for (int i = 0; i < MR; ++i) {
      const R x = COLUMNS ? a[k * as + i] : a[i * as + k];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += x * bv[j];
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + i * ldc + j * L, acc[i][j]);
}

template <class R, int MR, int NV, bool COLUMNS, Mode MODE>
static __attribute__((noinline)) void rest(int m, int64_t kd, const R* a, int64_t as, const R* b, int64_t ldb, R* c,
                                           int64_t ldc, const R* alpha) {
  if constexpr (MR > 0) {
    if (m == MR)
      micro<R, MR, NV, COLUMNS, MODE>(kd, a, as, b, ldb, c, ldc, alpha);
    else
      rest<R, MR - 1, NV, COLUMNS, MODE>(m, kd, a, as, b, ldb, c, ldc, alpha);
  }
}

struct Nothing {
  void operator()() {}
};

// `between` is called between blocks of rows.
template <class R, int NV, bool COLUMNS, Mode MODE, class Between = Nothing>
static __attribute__((noinline)) void gemm(int64_t m, int64_t kd, const R* a, int64_t as, const R* b, int64_t ldb, R* c,
                                           int64_t ldc, const R* alpha = nullptr, Between&& between = Between()) {
  constexpr int MR = kMicroRows;
  int64_t i = 0;
  // With one vector of lanes, twice as many rows fit into the registers. They hide the latency of the multiply-add.
  if constexpr (NV == 1)
    for (; i + 2 * MR <= m; i += 2 * MR, between())
      micro<R, 2 * MR, NV, COLUMNS, MODE>(kd, COLUMNS ? a + i : a + i * as, as, b, ldb, c + i * ldc, ldc, alpha);
  for (; i + MR <= m; i += MR, between())
    micro<R, MR, NV, COLUMNS, MODE>(kd, COLUMNS ? a + i : a + i * as, as, b, ldb, c + i * ldc, ldc, alpha);
  if (i < m)
    rest<R, MR - 1, NV, COLUMNS, MODE>(int(m - i), kd, COLUMNS ? a + i : a + i * as, as, b, ldb, c + i * ldc, ldc,
                                       alpha);
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
