// Random comparisons on random tiles, without a kernel: the range of a tile must hold for its pairs, and the truth
// bytes must be exact. Positions may have their maximum size, at which scores and biases would overflow.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#define LONGSPAN_ISA tested
#include "../leaves.h"
#include "case.h"
#include "masks.h"

namespace {

// Replaces a side's positions: consecutive or in any order, around 0 or of maximum size.
void move_positions(Case& c, Role role, int64_t length) {
  c.call.roles[role] = -1;
  if (chance(0.4)) return;
  const int64_t rows = chance(0.5) ? c.B : 1;
  const Array a = c.store.array(I32, {rows, length});
  const bool shuffled = chance(0.4);
  const int64_t first = !chance(c.far) ? pick(-40, 40) : chance(0.5) ? -kFar : kFar - length + 1;
  for (int64_t i = 0; i < count_of(a); ++i) set(a, i, double(first + (shuffled ? pick(0, length - 1) : i % length)));
  c.call.roles[role] = c.add(a);
}

bool is_literal(const Number& n, int32_t value) { return !n.data && n.value == value; }
bool is_run(const Term& t, const tested::Side& side) { return t.of == kSlot || (t.of == kPosition && side.steps); }

// Whether the range of a tile must be exact: for one end whose least and greatest values belong to tokens, and for
// residues of consecutive places, which are compared by distance.
bool is_exact(const Op& op, const tested::TileAt& at) {
  const int which = op.ends & (kLow | kHigh | kSame);
  if (which == kLow || which == kHigh) return is_literal(op.kv.modulo, 0) && is_literal(op.low.modulo, 0);
  bool same = which & kSame && is_run(op.kv, *at.kv) && is_run(op.low, *at.q) && !is_literal(op.kv.modulo, 0);
  for (const Term* t : {&op.kv, &op.low})
    same = same && is_literal(t->divide, 1) && is_literal(t->modulo, op.kv.modulo.value) &&
           is_literal(t->plus, op.kv.plus.value);
  return same;
}

std::string check_tile(const Problem& p, const Rule& rule, const tested::TileAt& at) {
  const Op& op = p.ops[0];
  std::vector<uint8_t> bytes(tested::kKeys * tested::kLanes, 0x55);
  tested::Row* rows = reinterpret_cast<tested::Row*>(bytes.data());
  const tested::Truth range = tested::range_of(op, at);
  tested::write_leaf(op, at, rows);
  bool any = false, all = true;
  for (int s = 0; s < at.kv->count; ++s)
    for (int t = 0; t < at.q->count; ++t) {
      const bool want = rule(at.b, at.n, at.q->first + t, at.kv->first + s);
      any |= want, all &= want;
      if (rows[s][t] != (want ? 0xFF : 0)) return "a byte is wrong";
    }
  if (any && !range.any) return "not EMPTY";
  if (!all && range.all) return "not FULL";
  return is_exact(op, at) && (any != range.any || all != range.all) ? "the range is too wide" : "";
}

std::string check_comparison(Case& c) {
  c.call.program.clear();
  const Rule rule = c.comparison();
  Built built;
  const std::string error = build(c.call, built);
  if (!error.empty()) return error;
  const Problem& p = built.problem;
  const int64_t b = pick(0, c.B - 1), n = pick(0, c.N - 1);
  const int64_t rows = chance(0.1) ? 1 : pick(1, tested::kLanes), keys = chance(0.1) ? 1 : pick(1, tested::kKeys);
  for (int64_t t = 0; t < c.T; t += rows)
    for (int64_t s = 0; s < c.S; s += keys) {
      tested::Side q, kv;
      tested::read_side(q, p.q_pos ? p.q_pos + b * p.q_pos_stride : nullptr, t, int(std::min(rows, c.T - t)));
      tested::read_side(kv, p.kv_pos ? p.kv_pos + b * p.kv_pos_stride : nullptr, s, int(std::min(keys, c.S - s)));
      const std::string wrong = check_tile(p, rule, {&p, b, n, &q, &kv, 0, 0, 0, 0});
      if (!wrong.empty()) return wrong + ", queries from " + std::to_string(t) + ", keys from " + std::to_string(s);
    }
  return "";
}

// The number of wrong comparisons.
int run_comparisons(int seed, int count) {
  rng.seed(unsigned(seed));
  Case c;
  c.make_inputs();
  if (c.S > 300) return 0;
  c.make_layout();
  int wrong = 0;
  for (int i = 0; i < count; ++i) {
    c.far = chance(0.3) ? 0.8 : 0.1;
    move_positions(c, kQPos, c.T), move_positions(c, kKvPos, c.S);
    const std::string error = check_comparison(c);
    if (error.empty()) continue;
    ++wrong;
    std::printf("comparison %d of case %d: %s; words", i, seed, error.c_str());
    for (int32_t word : c.call.program) std::printf(" %d", word);
    std::printf("\n");
  }
  return wrong;
}

}  // namespace
