// What a call of the kernel is: plain structs shared by the FFI handlers, the test driver and the kernels, which are
// compiled once per instruction set. No standard library here: an inline function instantiated under AVX-512 must never
// be the copy that the linker keeps for everybody.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace longspan {

enum Type : int32_t { F32, F64, BF16, F16, I32, U32, U8 };

struct Array {
  const void* data = nullptr;
  Type type = F32;
  int rank = 0;
  int64_t dims[6] = {0, 0, 0, 0, 0, 0};
};

// [B,N,T,S] seen through strides; an axis of size one has stride 0.
struct View4 {
  const void* data = nullptr;
  Type type = F32;
  int64_t b = 0, n = 0, t = 0, s = 0;
};

// An int32 for every batch row; a literal has no data.
struct Number {
  const int32_t* data = nullptr;
  int64_t stride = 0;
  int32_t value = 0;
  int64_t at(int64_t b) const { return data ? data[b * stride] : value; }
};

// A number for every token of a side: source // divide % modulo + plus, rounded down (modulo 0: none). Numbers,
// positions and slots lie within +-(2^30 - 1), and so do the entries of an array that something is added to: values fit
// int32, and where plus is not 0 so does one less and one more.
enum Source : int32_t {
  kPosition,  // -
  kSlot,      // -
  kArray,     // operand int32 or bool [B|1,L] or [B|1,N|1,L]
  kNumber,    // number
  kMember,    // operand: positions int32 [M], each greater than the one before; 1 if the token's is listed, else 0
  kSources,
};

// Which entries of an array give a value; a token without one sees nothing, and nothing sees it.
enum Valid : int32_t { kNotNegative, kNotZero, kAnyEntry, kValids };

// The word of a term: source, valid, operand or number of the source, numbers divide, modulo and plus.
struct Term {
  Source of = kPosition;
  Valid valid = kAnyEntry;
  Number number, divide, modulo, plus;
  const int32_t* data = nullptr;
  const uint8_t* flags = nullptr;
  int64_t b_stride = 0, n_stride = 0, count = 0;  // kArray: of a batch row and a head. kMember: positions
};

// Ends of a comparison: a strict one is an end, and kSame comes with both and none of them strict.
enum Ends : int32_t { kLow = 1, kHigh = 2, kSame = 4, kLowStrict = 8, kHighStrict = 16 };

// The mask program, postfix: leaves push a truth tile, And/Or/Not combine, PerHead runs one of its parts.
enum Code : int32_t {
  kFull,     // -
  kEmpty,    // -
  kWithin,   // ends, term kv, term low if it is an end, term high if it is one and not the same:
             // low(q) <= kv <= high(q), with < where an end is strict
  kBlocks,   // operand table int32 [B|1,N|1,nq,r], block size: kv blocks listed for a q block, by slot
  kDense,    // operand bool [B|1,N|1,T|1,S|1]
  kDenseAt,  // sides (1 = q, 2 = kv) that have an offset, operand bool [B|1,N|1,t,s], number q, number kv: what lies
             // outside of the array is not allowed; a side without an offset is as in Dense
  kBits,     // operand uint8 [Bl,Nl,nq,visits,q_tile,ceil(kv_tile/8)]: one bit per pair of every visited tile
  kPerHead,  // count, length of each part in words, the parts
  kAnd,      // -
  kOr,       // -
  kNot,      // -
  kCodes,
};

struct Op {
  Code code = kFull;
  int ends = 0;        // Within: some of Ends
  Term kv, low, high;  // Within: an end that is not there repeats the one that is
  int sides = 0;       // DenseAt: which have an offset
  Number lo, hi;       // DenseAt: the offsets of q and kv
  const int32_t* table = nullptr;
  const uint8_t* flags = nullptr;
  int64_t b_stride = 0, head_stride = 0, rows = 0, width = 0;  // Blocks; Dense: the array is rows x width
  int64_t block = 0;
  View4 view;
  int64_t first = 0, count = 0, next = 0;  // PerHead: parts in Problem::parts, the op after the last part
};

struct Layout {
  int64_t q_tile = 1, kv_tile = 1, nq = 0, nkv = 0, intervals = 0;
  const int32_t* starts = nullptr;
  const int32_t* stops = nullptr;
  const int32_t* columns = nullptr;
  const int32_t* column_count = nullptr;
  int64_t max_columns = 0;
  int64_t b_stride = 0, n_stride = 0;  // in (batch, head) rows of the layout: 0 when that axis has size one
};

struct Dropout {
  bool on = false;
  uint32_t seed[2] = {0, 0};
  uint32_t threshold = 0;  // keep where bits >= threshold
  double inverse_keep = 1;
};

// Biases that follow from positions, float or double (for F64), in the kernel's own words. A table may forbid keys, so
// it counts as a bias; slopes are finite.
struct ByDistance {
  const void* slopes = nullptr;  // [N]: -slope * |k_pos - q_pos|
  const void* table = nullptr;   // [N, 2 * reach + 1]: by k_pos - q_pos, clamped to +-reach
  int64_t reach = 0;
};

struct Problem {
  int64_t B = 0, T = 0, S = 0, N = 0, K = 0, H = 0, Hv = 0;  // Hv: of values and outputs
  Type type = F32;
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  double scale = 1, soft_cap = 0;  // soft_cap 0: none
  bool has_bias = false;
  View4 bias;
  const void* sinks = nullptr;  // float, or double for F64
  const int32_t *q_pos = nullptr, *kv_pos = nullptr;
  int64_t q_pos_stride = 0, kv_pos_stride = 0;
  const int32_t *row_ids = nullptr, *head_ids = nullptr;  // global batch rows and heads; null: 0, 1, 2, ...
  Layout layout;
  Dropout dropout;
  const Op* ops = nullptr;
  int64_t op_count = 0;
  int depth = 1;                   // the stack's height
  const int64_t* parts = nullptr;  // PerHead: the first op of each part
  bool by_head = false;            // the mask or the layout differs between heads
  bool has_bits = false;
  ByDistance by_distance;
  // The gradient will be taken. Backward computes scores by tiles, and exp(score - lse) is as wrong as the two scores
  // are different: where scores are 1e7, rounding in another order is all of it. So few queries must not stream.
  bool by_tiles = false;
};

struct Forward {
  void* out = nullptr;      // [B,T,N,Hv]
  void* lse = nullptr;      // [B,T,N] float, or double for F64
  void* lse_low = nullptr;  // what lse lost in rounding: where scores are -1e9, a sum's logarithm is lost in it
  Type out_type = F32;      // the inputs' or lse's
};

struct Backward {
  const void *lse = nullptr, *lse_low = nullptr;  // [B,T,N]
  const void* dout = nullptr;                     // [B,T,N,Hv]
  const void* delta = nullptr;                    // [B,T,N]: sum(dout * out) - dlse
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  void *scratch_dk = nullptr, *scratch_dv = nullptr;  // [B,K,rows,padded H or Hv] float, or double for F64
  int64_t rows = 0;                                   // at least S; more rows let more chunks of queries run at once
  void* dslopes = nullptr;  // [B,T,N] float, or double for F64: what each query adds to the gradient of its slope
};

// Gradient of the bias in its own shape (float, or double for F64); `scratch` is [parts, *shape] when T is reduced.
// That of the table, if `of_table`, has the shape [1, N, 1, 2 * reach + 1].
struct BiasGradient {
  const void *lse = nullptr, *lse_low = nullptr;
  const void* dout = nullptr;
  const void* delta = nullptr;
  void* dbias = nullptr;
  int64_t dims[4] = {1, 1, 1, 1};
  void* scratch = nullptr;
  int64_t chunks = 1;
  bool of_table = false;
};

// Runs fn(ctx, task, scratch) for every task in [0, tasks), each once, on any threads; scratch belongs to the thread,
// and its first kFreshBytes are zero before the thread's first task. False: out of memory, and nothing useful was done.
constexpr size_t kFreshBytes = 64;
typedef void (*TaskFn)(void* ctx, int64_t task, void* scratch);
struct Runner {
  virtual bool run(int64_t tasks, TaskFn fn, void* ctx, size_t scratch_bytes) = 0;

 protected:
  ~Runner() = default;
};

// One matrix of a product: y = x W, with W [inner, outer], or [outer, inner] if it lies by what comes out.
struct Matrix {
  const void* data = nullptr;
  Type type = F32;  // or BF16
  int64_t outer = 0;
  float* y = nullptr;  // [rows, outer]
};

// A few rows times some matrices that share them: what a decoder does with a new token of each row.
struct Product {
  const float* x = nullptr;  // [rows, inner]
  int64_t rows = 0, inner = 0, count = 0;
  bool by_outer = false;
  const Matrix* matrices = nullptr;
};

struct Kernel {
  const char* name;
  int vector_bytes;
  bool (*forward)(const Problem&, const Forward&, Runner&);  // false: out of memory
  bool (*backward)(const Problem&, const Backward&, Runner&);
  bool (*bias_gradient)(const Problem&, const BiasGradient&, Runner&);
  bool (*product)(const Product&, Runner&);
};

constexpr int kMaxHead = 256;
constexpr int kMaxRows = 64;     // of a product: with more, arithmetic would be what takes the time
constexpr int kMaxMatrices = 8;  // of a product
constexpr int kMaxStack = 32;
constexpr int kMaxNested = 64;  // PerHead inside PerHead
constexpr int kPadBytes = 64;   // rows of scratch_dk and scratch_dv are padded to this many bytes

}  // namespace longspan
