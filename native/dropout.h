// The hash of longspan/dropout.py on lanes. The part that depends on the query is computed once per tile, the rest once
// per weight.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

struct DropoutLanes {
  alignas(64) uint32_t first[kLanes];
  alignas(64) uint32_t second[kLanes];
  uint32_t threshold;

  template <class U> static inline U mix(U x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
  }

  void begin(const Problem& p, const QueryTile& tile, const Side& q) {
    threshold = p.dropout.threshold;
    for (int i = 0; i < kLanes; ++i) {
      const int lane = i < tile.lanes() ? i : 0;
      const uint32_t row = uint32_t(p.row_ids ? p.row_ids[tile.b] : int32_t(tile.b));
      const uint32_t head = uint32_t(p.head_ids ? p.head_ids[tile.head(lane)] : int32_t(tile.head(lane)));
      const uint32_t pos = uint32_t(q.pos[lane % tile.rows]);
      first[i] = mix(mix(mix(p.dropout.seed[0] + row) ^ head) + pos);
      second[i] = mix(mix(mix(p.dropout.seed[1] + row) ^ head) + pos);
    }
  }

  // The lanes of [lane, lane + vector) whose weights are kept for the key at `position`, as a mask.
  template <class R> inline typename Simd<R>::I keep(int lane, int32_t position) const {
    constexpr int L = Simd<R>::lanes;
    typedef uint32_t U __attribute__((vector_size(4 * L), may_alias));
    const U x = *reinterpret_cast<const U*>(first + lane), y = *reinterpret_cast<const U*>(second + lane);
    typedef int32_t Kept __attribute__((vector_size(4 * L), may_alias));
    const Kept kept = (Kept)(mix<U>(mix<U>(x ^ uint32_t(position)) + y) >= threshold);
    return __builtin_convertvector(kept, typename Simd<R>::I);
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
