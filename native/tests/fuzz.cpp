// Invalid calls: words of random mask programs are changed, moved and removed, roles and operands exchanged, numbers
// made extreme. `build` must refuse or accept each call, and accepted calls must run, since the kernels do not check
// them. Results are not compared: sanitizers report the errors, as for driver.cpp.
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "case.h"
#include "masks.h"
#include "runner.h"

namespace {

constexpr int kDamagedPerCase = 8;

int32_t extreme() {
  const int32_t all[] = {INT32_MIN, INT32_MIN + 1, -1, 0, 1, INT32_MAX - 1, INT32_MAX};
  return all[pick(0, 6)];
}

int32_t any_word(const Call& call) {
  if (chance(0.2)) return extreme();
  if (chance(0.4)) return int32_t(pick(kFull, kCodes));
  return int32_t(pick(-1, int64_t(call.rest.size())));
}

void damage_program(Call& call) {
  std::vector<int32_t>& words = call.program;
  const int64_t size = int64_t(words.size()), from = pick(0, size), to = pick(from, size);
  const std::vector<int32_t> span(words.begin() + from, words.begin() + to);
  switch (pick(0, 5)) {
    case 0: words.erase(words.begin() + from, words.begin() + to); break;
    case 1: words.insert(words.begin() + pick(0, size), span.begin(), span.end()); break;
    case 2: words.insert(words.begin() + from, any_word(call)); break;
    case 3: words.insert(words.begin(), {kPerHead, 1, int32_t(size)}); break;
    default:
      if (from < size) words[size_t(from)] = any_word(call);
  }
}

// The integers of an operand: numbers, tables, ids and positions of a mask.
void damage_data(Call& call) {
  std::vector<Array> arrays = call.rest;
  arrays.push_back(call.starts), arrays.push_back(call.stops);
  const Array& a = arrays[size_t(pick(0, int64_t(arrays.size()) - 1))];
  if (a.type != I32 || count_of(a) == 0) return;
  for (int64_t times = pick(1, 8); times > 0; --times) set(a, pick(0, count_of(a) - 1), extreme());
}

void damage(Call& call) {
  const int64_t last = int64_t(call.rest.size()) - 1;
  switch (pick(0, 9)) {
    case 0: call.roles[size_t(pick(0, kRoles - 1))] = any_word(call); break;
    case 1:
      if (last >= 0) std::swap(call.rest[size_t(pick(0, last))], call.rest[size_t(pick(0, last))]);
      break;
    case 2: (chance(0.5) ? call.q_tile : call.kv_tile) = any_word(call); break;
    case 3:
    case 4:
    case 5: damage_data(call); break;
    default: damage_program(call);
  }
}

void run(Case& c, const Call& call, const Built& built, const Kernel* kernel) {
  const Type stats = c.type == F64 ? F64 : F32;
  const auto made = [&](Type type, std::initializer_list<int64_t> dims) {
    const Array a = c.store.array(type, dims);
    for (int64_t i = 0; i < count_of(a); ++i) set(a, i, 0);
    return a;
  };
  const auto data = [](const Array& a) { return const_cast<void*>(a.data); };
  ThreadRunner runner(1);
  const Array out = made(c.type, {c.B, c.T, c.N, c.Hv}), delta = made(stats, {c.B, c.T, c.N});
  const Array lse = made(stats, {c.B, c.T, c.N}), low = made(stats, {c.B, c.T, c.N});
  kernel->forward(built.problem, {data(out), data(lse), data(low), out.type}, runner);
  const Given given = {lse, low, out, delta};
  const int64_t unit = kPadBytes / size_of(stats), padded = (c.H + unit - 1) / unit * unit,
                v_padded = (c.Hv + unit - 1) / unit * unit;
  const Array dq = made(c.type, {c.B, c.T, c.N, c.H}), scratch = made(stats, {c.B, c.K, c.S, padded}),
              v_scratch = made(stats, {c.B, c.K, c.S, v_padded});
  const Array dk = made(c.type, {c.B, c.S, c.K, c.H}), dv = made(c.type, {c.B, c.S, c.K, c.Hv});
  const auto aligned = [&](const Array& a) {  // its bytes are a multiple of kPadBytes
    void* data = std::aligned_alloc(kPadBytes, size_t(count_of(a) * size_of(stats)));
    return std::unique_ptr<void, void (*)(void*)>(data, std::free);
  };
  const auto scratch_dk = aligned(scratch), scratch_dv = aligned(v_scratch);
  Backward g;
  if (!check_backward(built.problem, given, dq, dk, dv, scratch, v_scratch, g).empty()) std::abort();
  g.dq = data(dq), g.dk = data(dk), g.dv = data(dv);
  g.scratch_dk = scratch_dk.get(), g.scratch_dv = scratch_dv.get();
  const Array dslopes = made(stats, {c.B, c.T, c.N});
  g.dslopes = data(dslopes);
  kernel->backward(built.problem, g, runner);
  for (const Role role : {kBias, kTable}) {
    if (call.roles[role] < 0) continue;
    Array bias = call.rest[size_t(call.roles[role])];
    Call of = call;
    of.of_table = role == kTable;
    if (of.of_table) bias.dims[3] = bias.dims[1], bias.dims[1] = bias.dims[0], bias.dims[0] = bias.dims[2] = 1;
    const Array dbias = made(stats, {bias.dims[0], bias.dims[1], bias.dims[2], bias.dims[3]});
    const Array chunks = made(stats, {2, bias.dims[0], bias.dims[1], bias.dims[2], bias.dims[3]});
    BiasGradient b;
    if (!check_bias_gradient(built.problem, of, given, dbias, chunks, b).empty()) std::abort();
    b.dbias = data(dbias), b.scratch = data(chunks);
    kernel->bias_gradient(built.problem, b, runner);
  }
}

// Returns whether a call was accepted, and runs it if so.
bool survive(Case& c, const Call& call) {
  Built built;
  if (!build(call, built).empty()) return false;
  const size_t before = c.store.all.size();
  for (const Kernel* kernel : kernels_here()) run(c, call, built, kernel);
  c.store.all.resize(before);
  return true;
}

// A very deeply nested program: the parser must refuse it before the recursion exhausts the stack.
bool refuses_endless_nesting(Case& c) {
  constexpr int32_t kDepth = 200000;
  Call call = c.call;
  call.program.clear();
  for (int32_t rest = kDepth; rest > 0; --rest) call.program.insert(call.program.end(), {kPerHead, 1, 3 * rest - 2});
  call.program.push_back(kFull);
  Built built;
  return build(call, built).find("nested deeper") != std::string::npos;
}

}  // namespace

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, count = argc > 2 ? std::atoi(argv[2]) : 50;
  int accepted = 0, refused = 0;
  bool shallow = false;
  for (int seed = first; seed < first + count; ++seed) {
    rng.seed(unsigned(seed));
    Case c;
    c.make_inputs();
    c.make_layout();
    c.rule = c.tree(3, true);
    c.make_garbage();  // masked inputs may be allowed now
    if (seed == first) shallow = refuses_endless_nesting(c);
    const Call whole = chance(0.25) ? c.stacked() : c.call;
    for (int i = 0; i < kDamagedPerCase; ++i) {
      Call call = whole;
      for (int64_t times = pick(1, 3); times > 0; --times) damage(call);
      survive(c, call) ? ++accepted : ++refused;
    }
  }
  std::printf("%d damaged calls accepted and run, %d refused\n", accepted, refused);
  if (!shallow) std::printf("a program nested without end was not refused\n");
  return !shallow || !accepted || !refused;
}
