// Turns scores into weights: soft cap, bias, mask, online softmax and dropout, for the panels of one tile of queries.
// Each lane is a query, so the running maximum and sum are vectors, and nothing is reduced across lanes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "distance.h"
#include "dropout.h"
#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

template <class R, int NV>
struct Softmax {
  static constexpr int L = Simd<R>::lanes, PANEL = NV * L;
  const Problem* p;
  Masker<R, PANEL> masker;
  R *top, *sum;  // running maximum and sum of each lane
  DropoutLanes drop;
  SlopeLanes<R> slopes;

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    masker.take(arena, problem);
    top = arena.take<R>(kLanes);
    sum = arena.take<R>(kLanes);
  }

  void begin(const QueryTile& tile) {
    masker.begin(tile);
    for (int i = 0; i < kLanes; ++i) top[i] = -kInf<R>, sum[i] = 0;
    if (p->dropout.on) drop.begin(*p, tile, masker.q);
    if (p->by_distance.slopes) slopes.begin(*p, tile, masker.q);
  }

  // Turns the products of a panel's queries and keys [first, first + count), in `s`, into weights. `alpha` receives the
  // factor of the earlier sums.
  void weigh(R* s, int panel, int first, int count, R* alpha) {
    if (p->soft_cap != 0) soften(s, count);
    if (p->has_bias) add_bias(s, panel, first, count);
    if (p->by_distance.slopes) slopes.add(s, PANEL, NV, panel * PANEL, masker.kv.pos + first, count);
    if (masker.mask.exact[panel])
      softmax<false>(s, panel, first, count, alpha);
    else
      softmax<true>(s, panel, first, count, alpha);
    if (p->dropout.on) drop_some(s, panel, first, count);
  }

  void soften(R* s, int count) {
    const R cap = R(p->soft_cap), inverse = R(1 / p->soft_cap);
    for (int i = 0; i < count * PANEL; i += L) store(s + i, cap * vtanh(load(s + i) * inverse));
  }

  void add_bias(R* s, int panel, int first, int count) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const Vec<R> b = load(masker.bias + (first + i) * kLanes + panel * PANEL + j);
        store(s + i * PANEL + j, load(s + i * PANEL + j) + b);
      }
  }

  // Turns the scores in `s` into exp(score - maximum).
  template <bool MASKED>
  __attribute__((noinline)) void softmax(R* s, int panel, int first, int count, R* alpha) {
    const int lane = panel * PANEL;
    Vec<R> high[NV], base[NV], total[NV];
    for (int j = 0; j < NV; ++j) high[j] = load(top + lane + j * L);
    mask_and_maximum<MASKED>(s, lane, first, count, high);
    for (int j = 0; j < NV; ++j) {
      const Vec<R> old = load(top + lane + j * L);
      // For a lane without keys so far, (-inf) - (-inf) would be NaN.
      base[j] = high[j] == -kInf<R> ? splat(R(0)) : high[j];
      total[j] = Vec<R>{};
      store(alpha + j * L, vexp(old - base[j]));
      store(top + lane + j * L, high[j]);
    }
    int i = 0;
    for (; i + 2 <= count; i += 2) exponentiate<2>(s + i * PANEL, base, total);
    for (; i < count; ++i) exponentiate<1>(s + i * PANEL, base, total);
    for (int j = 0; j < NV; ++j) store(sum + lane + j * L, load(sum + lane + j * L) * load(alpha + j * L) + total[j]);
  }

  template <bool MASKED>
  inline __attribute__((always_inline)) void mask_and_maximum(R* s, int lane, int first, int count, Vec<R>* high) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < NV; ++j) {
        Vec<R> x = load(s + i * PANEL + j * L);
        if (MASKED) {
          x = lanes_of<R>(masker.mask.bytes[first + i] + lane + j * L) ? x : splat(-kInf<R>);
          store(s + i * PANEL + j * L, x);
        }
        high[j] = x > high[j] ? x : high[j];
      }
  }

  template <int KEYS>
  static inline __attribute__((always_inline)) void exponentiate(R* scores, const Vec<R>* base, Vec<R>* total) {
    Vec<R> x[KEYS * NV];
    for (int i = 0; i < KEYS * NV; ++i) x[i] = load(scores + i * L) - base[i % NV];
    exp_each<KEYS * NV>(x);
    for (int i = 0; i < KEYS * NV; ++i) {
      total[i % NV] += x[i];
      store(scores + i * L, x[i]);
    }
  }

  void drop_some(R* s, int panel, int first, int count) {
    const R factor = R(p->dropout.inverse_keep);
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const auto keep = drop.template keep<R>(panel * PANEL + j, masker.kv.pos[first + i]);
        store(s + i * PANEL + j, keep ? load(s + i * PANEL + j) * factor : splat(R(0)));
      }
  }
};

// The totals of a row: the maximum of its logits, the sum of exp(logit - maximum), and the divisor of its output.
template <class R>
struct Total {
  R top, sum, divisor;
};

// The sink is added last, when it is known whether the row sees any key: a row without keys has zero output, whatever
// the sink is.
template <class R>
static inline Total<R> with_sink(const Problem& p, int64_t head, R top, R sum) {
  const R sink = p.sinks ? static_cast<const R*>(p.sinks)[head] : -kInf<R>;
  if (sink == -kInf<R>) return {top, sum, sum};
  if (sum == 0) return {sink, R(1), R(0)};
  const R high = sink > top ? sink : top, share = R(__builtin_exp(double(top - high)));
  const R total = sum * share + R(__builtin_exp(double(sink - high)));
  return {high, total, total / share};
}

// lse = maximum + log(sum), and the rounding error of that sum.
template <class R>
static inline void write_lse(const Forward& f, int64_t at, const Total<R>& total) {
  const R log_sum = R(__builtin_log(double(total.sum))), lse = total.sum == 0 ? -kInf<R> : total.top + log_sum;
  static_cast<R*>(f.lse)[at] = lse;
  static_cast<R*>(f.lse_low)[at] = __builtin_isfinite(lse) ? (total.top - lse) + log_sum : R(0);
}

// Writes out / divisor, and lse.
template <class R>
static inline void finish_row(const Problem& p, const Forward& f, int64_t at, R* x, const Total<R>& total) {
  const R inverse = R(1) / total.divisor;
  for (int64_t h = 0; h < p.Hv; ++h) x[h] = total.divisor == 0 ? R(0) : x[h] * inverse;
  write_row(f.out, f.out_type, at * p.Hv, x, p.Hv);
  write_lse(f, at, total);
}

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
