// A bias that decreases with the distance, -slope * |k - q| (ALiBi), on lanes: added to the scores, never stored.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

template <class R>
struct SlopeLanes {
  static constexpr int L = Simd<R>::lanes;
  alignas(64) uint32_t pos[kLanes];
  alignas(64) R slope[kLanes];

  void begin(const Problem& p, const QueryTile& tile, const Side& q) {
    for (int head = 0, i = 0; head < tile.heads; ++head)
      for (int row = 0; row < tile.rows; ++row, ++i) {
        pos[i] = uint32_t(q.pos[row]);
        slope[i] = static_cast<const R*>(p.by_distance.slopes)[tile.n + head];
      }
    for (int i = tile.lanes(); i < kLanes; ++i) pos[i] = 0, slope[i] = 0;
  }

  // |k - q| of lanes [lane, lane + vector), in integers: large positions as floats would round their difference away.
  inline __attribute__((always_inline)) Vec<R> distance(int lane, int32_t position) const {
    typedef uint32_t U __attribute__((vector_size(4 * L), may_alias));
    typedef int32_t I __attribute__((vector_size(4 * L), may_alias));
    const U ahead = uint32_t(position) - *reinterpret_cast<const U*>(pos + lane);
    const I apart = (I)((I)ahead < 0 ? -ahead : ahead);
    return __builtin_convertvector(apart, Vec<R>);
  }

  // Adds the bias to the scores of `count` keys, `stride` elements apart, for `vectors` vectors of lanes.
  inline __attribute__((always_inline)) void add(R* scores, int64_t stride, int vectors, int lane, const int32_t* keys,
                                                 int count) const {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < vectors * L; j += L) {
        R* at = scores + i * stride + j;
        store(at, load(at) - load(slope + lane + j) * distance(lane + j, keys[i]));
      }
  }

  // Adds the gradients of the scores times their distances to `sums`.
  inline __attribute__((always_inline)) void add_gradient(R* sums, const R* gradients, int64_t stride, int vectors,
                                                          int lane, const int32_t* keys, int count) const {
    for (int j = 0; j < vectors * L; j += L) {
      Vec<R> sum = load(sums + lane + j);
      for (int i = 0; i < count; ++i) sum += load(gradients + i * stride + j) * distance(lane + j, keys[i]);
      store(sums + lane + j, sum);
    }
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
