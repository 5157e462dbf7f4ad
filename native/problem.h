// The structs of a kernel call, shared by the FFI handlers, the test driver and the kernels. The kernels are compiled
// once per instruction set. This header includes nothing of the standard library: the linker keeps one copy of an
// inline function, and a copy compiled for AVX-512 must not run on other machines.
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

// An array [B,N,T,S] by strides; an axis of size one has stride 0.
struct View4 {
  const void* data = nullptr;
  Type type = F32;
  int64_t b = 0, n = 0, t = 0, s = 0;
};

// One int32 per batch row; a literal has no data.
struct Number {
  const int32_t* data = nullptr;
  int64_t stride = 0;
  int32_t value = 0;
  int64_t at(int64_t b) const { return data ? data[b * stride] : value; }
};

// The value of a term for a token: source // divide % modulo + plus, rounded down (modulo 0: none). Numbers, positions
// and slots lie within +-(2^30 - 1). So do the entries of an array if plus is not 0. Hence values fit int32, and if
// plus is not 0, value - 1 and value + 1 fit too.
enum Source : int32_t {
  kPosition,  // -
  kSlot,      // -
  kArray,     // operand int32 or bool [B|1,L] or [B|1,N|1,L]
  kNumber,    // number
  kMember,    // operand: positions int32 [M], ascending; 1 if the token's position is listed, else 0
  kSources,
};

// The entries of an array that are valid. A token whose entry is not valid neither sees nor is seen.
enum Valid : int32_t { kNotNegative, kNotZero, kAnyEntry, kValids };

// In the mask program a term is: source, valid, the operand or number of the source, the numbers divide, modulo, plus.
struct Term {
  Source of = kPosition;
  Valid valid = kAnyEntry;
  Number number, divide, modulo, plus;
  const int32_t* data = nullptr;
  const uint8_t* flags = nullptr;
  int64_t b_stride = 0, n_stride = 0, count = 0;  // kArray: strides of batch row and head; kMember: number of positions
};

// The ends of a comparison. kLowStrict comes with kLow, kHighStrict with kHigh, and kSame with kLow and kHigh only.
enum Ends : int32_t { kLow = 1, kHigh = 2, kSame = 4, kLowStrict = 8, kHighStrict = 16 };

// The mask program in postfix order: leaves push a tile of truth values, And/Or/Not combine, PerHead runs one part.
enum Code : int32_t {
  kFull,     // -
  kEmpty,    // -
  kWithin,   // ends, term kv, term low if there is a lower end, term high if there is another upper end:
             // low(q) <= kv <= high(q), with < where an end is strict
  kBlocks,   // operand table int32 [B|1,N|1,nq,r], block size: the kv blocks listed for each q block, by slot
  kDense,    // operand bool [B|1,N|1,T|1,S|1]
  kDenseAt,  // sides (1 = q, 2 = kv) that have an offset, operand bool [B|1,N|1,t,s], number q, number kv: pairs
             // outside of the array are not allowed; a side without an offset is as in Dense
  kBits,     // operand uint8 [Bl,Nl,nq,visits,q_tile,ceil(kv_tile/8)]: one bit per pair of every visited tile
  kPerHead,  // count, length of each part in words, the parts
  kAnd,      // -
  kOr,       // -
  kNot,      // -
  kCodes,
};

struct Op {
  Code code = kFull;
  int ends = 0;        // Within: flags of Ends
  Term kv, low, high;  // Within: a missing end repeats the other one
  int sides = 0;       // DenseAt: the sides with an offset
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

// Biases by distance, float or double (for F64). A table may hold -inf and so mask keys, as an array may; slopes are
// finite.
struct ByDistance {
  const void* slopes = nullptr;  // [N]: -slope * |k_pos - q_pos|
  const void* table = nullptr;   // [N, 2 * reach + 1]: by k_pos - q_pos, clamped to +-reach
  int64_t reach = 0;
};

struct Problem {
  int64_t B = 0, T = 0, S = 0, N = 0, K = 0, H = 0, Hv = 0;  // Hv: of values and outputs
  Type type = F32;
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  // Steps in rows of k and v from slot to slot and from kv head to kv head: K and 1 for [B,S,K,H], 1 and S for
  // [B,K,S,H].
  int64_t slot_step = 0, head_step = 0;
  double scale = 1, soft_cap = 0;  // soft_cap 0: none
  bool has_bias = false;
  View4 bias;
  const void* sinks = nullptr;  // float, or double for F64
  const int32_t *q_pos = nullptr, *kv_pos = nullptr;
  int64_t q_pos_stride = 0, kv_pos_stride = 0;
  const int32_t *row_ids = nullptr, *head_ids = nullptr;  // numbers in the whole batch; null: 0, 1, 2, ...
  Layout layout;
  Dropout dropout;
  const Op* ops = nullptr;
  int64_t op_count = 0;
  int depth = 1;                   // of the stack
  const int64_t* parts = nullptr;  // PerHead: the first op of each part
  bool by_head = false;            // whether the mask or the layout differs between heads
  bool has_bits = false;
  ByDistance by_distance;
  // The call is differentiated. The backward pass computes scores by tiles, and exp(score - lse) is wrong by the factor
  // exp(difference of the two scores): for scores of 1e7, another order of rounding ruins it. So the forward pass must
  // compute tiles too, and not stream keys, even for few queries.
  bool by_tiles = false;

  // The row of a key or value in k or v.
  int64_t kv_row(int64_t b, int64_t s, int64_t head) const { return b * S * K + s * slot_step + head * head_step; }
};

struct Forward {
  void* out = nullptr;      // [B,T,N,Hv]
  void* lse = nullptr;      // [B,T,N] float, or double for F64
  void* lse_low = nullptr;  // the rounding error of lse: with scores of -1e9, lse loses the logarithm of the sum
  Type out_type = F32;      // that of the inputs or of lse
};

struct Backward {
  const void *lse = nullptr, *lse_low = nullptr;  // [B,T,N]
  const void* dout = nullptr;                     // [B,T,N,Hv]
  const void* delta = nullptr;                    // [B,T,N]: sum(dout * out) - dlse
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  void *scratch_dk = nullptr, *scratch_dv = nullptr;  // [B,K,rows,padded H or Hv] float, or double for F64
  int64_t rows = 0;                                   // at least S; with more rows, more chunks of queries run at once
  void* dslopes = nullptr;  // [B,T,N] float, or double for F64: the contribution of each query to its slope's gradient
};

// The gradient of the bias, in the bias's shape (float, or double for F64); `scratch` is [parts, *shape] if the bias
// has no query axis. With `of_table`, the gradient of the table, of shape [1, N, 1, 2 * reach + 1].
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

// Runs fn(ctx, task, scratch) once for every task in [0, tasks), on any thread. Each thread has its own scratch, whose
// first kFreshBytes are zero before its first task. Returns false if out of memory; results are then undefined.
constexpr size_t kFreshBytes = 64;
typedef void (*TaskFn)(void* ctx, int64_t task, void* scratch);
struct Runner {
  virtual bool run(int64_t tasks, TaskFn fn, void* ctx, size_t scratch_bytes) = 0;

 protected:
  ~Runner() = default;
};

// One matrix of a product: y = x W, with W [inner, outer], or [outer, inner] with `by_outer`.
struct Matrix {
  const void* data = nullptr;
  Type type = F32;  // or BF16
  int64_t outer = 0;
  float* y = nullptr;  // [rows, outer]
};

// The products of the same few rows with several matrices, as in a decoder that computes one new token per row.
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
constexpr int kMaxRows = 64;     // of a product: with more rows, arithmetic is the bottleneck, not memory
constexpr int kMaxMatrices = 8;  // of a product
constexpr int kMaxStack = 32;
constexpr int kMaxNested = 64;  // PerHead inside PerHead
constexpr int kPadBytes = 64;   // rows of scratch_dk and scratch_dv are padded to this many bytes

}  // namespace longspan
