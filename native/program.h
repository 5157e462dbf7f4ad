// Builds a Problem from arrays. It checks every shape, type and word of the mask program once, so that the kernels need
// no checks.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace longspan {

// Python compares this with ABI in longspan/engines/cpu/library.py when it opens the library. Raise both whenever a
// call changes: the words of the mask program, roles, attributes, operands or results.
constexpr int32_t kAbi = 9;

// Roles of optional arrays. Call::roles has their index in Call::rest, -1 if absent. The mask program refers to further
// arrays by index.
enum Role {
  kBias,
  kSinks,
  kQPos,
  kKvPos,
  kColumns,
  kColumnCount,
  kRowIds,
  kHeadIds,
  kSeed,
  kSlopes,
  kTable,
  kLayer,  // int32 []: k and v are stacks with a layer axis before B, and this is the index into it
  kRoles
};

struct Call {
  Array q, k, v, starts, stops;
  std::vector<Array> rest;
  std::vector<int32_t> roles, program;
  double scale = 1, soft_cap = 0, dropout_rate = 0;
  uint32_t dropout_threshold = 0;
  int64_t q_tile = 1, kv_tile = 1;
  bool by_tiles = false;     // see Problem
  bool of_table = false;     // see BiasGradient
  bool heads_first = false;  // whether k and v are [B,K,S,H], not [B,S,K,H]
};

struct Built {
  Problem problem;
  std::vector<Op> ops;
  std::vector<int64_t> parts;
};

// Returns an empty string on success, else the error.
std::string build(const Call& call, Built& built);

// The operands of the backward passes, in addition to those of a forward call.
struct Given {
  Array lse, lse_low, dout, delta;
};

std::string check_forward(const Problem& p, const Array& out, const Array& lse, const Array& lse_low);
std::string check_backward(const Problem& p, const Given& given, const Array& dq, const Array& dk, const Array& dv,
                           const Array& scratch_dk, const Array& scratch_dv, Backward& g);
std::string check_slope_gradient(const Problem& p, const Array& dslopes);
std::string check_bias_gradient(const Problem& p, const Call& call, const Given& given, const Array& dbias,
                                const Array& scratch, BiasGradient& g);

// The best kernel for this machine, or the one that LONGSPAN_CPU_ISA names; null with `error` set if it cannot run
// here.
const Kernel* choose_kernel(const char* forced, std::string& error);
std::vector<const Kernel*> kernels_here();

}  // namespace longspan
