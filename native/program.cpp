#include "program.h"

#include <algorithm>

namespace longspan {
namespace {

std::string shape_of(const Array& a) {
  std::string s = "[";
  for (int i = 0; i < a.rank; ++i) s += (i ? "," : "") + std::to_string(a.dims[i]);
  return s + "]";
}

bool is_shape(const Array& a, std::initializer_list<int64_t> dims) {
  if (a.rank != int(dims.size())) return false;
  int i = 0;
  for (int64_t d : dims)
    if (a.dims[i++] != d) return false;
  return true;
}

bool one_or(int64_t size, int64_t full) { return size == 1 || size == full; }
bool is_float(Type t) { return t == F32 || t == F64 || t == BF16 || t == F16; }

std::string bad(const std::string& name, const std::string& expected, const Array& got) {
  return name + " must be " + expected + ", got shape " + shape_of(got) + " and type " + std::to_string(got.type);
}

// Reads the words of a mask program into ops.
class Decoder {
 public:
  Decoder(const Call& call, Built& built) : call_(call), built_(built), p_(built.problem) {}

  std::string run() {
    int64_t height = 0;
    decode(0, int64_t(call_.program.size()), 0, height);
    if (error_.empty() && height != 1) error_ = "mask program leaves " + std::to_string(height) + " values, not one";
    return error_;
  }

 private:
  const Call& call_;
  Built& built_;
  Problem& p_;
  std::string error_;
  int64_t at_ = 0, end_ = 0;
  int nested_ = 0;  // the current nesting depth of PerHead

  void fail(const std::string& message) {
    if (error_.empty()) error_ = "mask program, word " + std::to_string(at_) + ": " + message;
  }

  int32_t word() {
    if (at_ >= end_) return fail("ends too early"), 0;
    return call_.program[size_t(at_++)];
  }

  Array operand(const char* name) {
    const int32_t i = word();
    if (error_.empty() && (i < 0 || i >= int32_t(call_.rest.size())))
      fail(std::string(name) + ": no operand " + std::to_string(i));
    return error_.empty() ? call_.rest[size_t(i)] : Array();
  }

  Number number() {  // kind, value: a literal (0), or the index of an int32 operand (1), [] or [1] or [B]
    Number n;
    const int32_t kind = word();
    if (kind == 0) return n.value = word(), n;
    if (kind != 1) return fail("a number is a literal (0) or an operand (1)"), n;
    const Array a = operand("number");
    if (!error_.empty()) return n;
    if (a.type != I32 || a.rank > 1 || (a.rank == 1 && !one_or(a.dims[0], p_.B)))
      return fail(bad("a number", "int32 [] or [B]", a)), n;
    n.data = static_cast<const int32_t*>(a.data);
    n.stride = a.rank == 1 && a.dims[0] > 1;
    return n;
  }

  Term term(const char* name, int64_t length) {
    Term t;
    const int32_t of = word(), valid = word();
    if (of < 0 || of >= kSources || valid < 0 || valid >= kValids) return fail("there is no such term"), t;
    if (of != kArray && valid != kAnyEntry) return fail("only entries of arrays can be invalid"), t;
    t.of = Source(of), t.valid = Valid(valid);
    if (t.of == kNumber) t.number = number();
    if (t.of == kArray) array(t, name, length);
    if (t.of == kMember) members(t);
    t.divide = number(), t.modulo = number(), t.plus = number();
    if (!t.divide.data && t.divide.value < 1) fail("a term is divided by at least 1");
    if (!t.modulo.data && t.modulo.value < 0) fail("modulo must be at least 1, or 0 for none");
    return t;
  }

  void array(Term& t, const char* name, int64_t length) {
    const Array a = operand(name);
    const bool heads = a.rank == 3, typed = a.type == I32 || a.type == U8;
    const bool shaped = (a.rank == 2 || (heads && one_or(a.dims[1], p_.N))) && one_or(a.dims[0], p_.B);
    if (error_.empty() && (!typed || !shaped || a.dims[a.rank - 1] != length))
      fail(bad(
          name,
          "int32 or bool [B or 1, " + std::to_string(length) + "] or [B or 1, N or 1, " + std::to_string(length) + "]",
          a));
    if (a.type == U8)
      t.flags = static_cast<const uint8_t*>(a.data);
    else
      t.data = static_cast<const int32_t*>(a.data);
    t.n_stride = heads && a.dims[1] > 1 ? length : 0;
    t.b_stride = a.dims[0] > 1 ? length * (heads ? a.dims[1] : 1) : 0;
    p_.by_head |= t.n_stride > 0;
  }

  void members(Term& t) {
    const Array a = operand("positions");
    if (error_.empty() && (a.type != I32 || a.rank != 1)) fail(bad("positions", "int32 [M]", a));
    t.data = static_cast<const int32_t*>(a.data);
    t.count = a.dims[0];
  }

  void within(Op& op) {
    op.ends = word();
    const int which = op.ends & (kLow | kHigh | kSame), strict = op.ends - which;
    const bool same = which == (kLow | kHigh | kSame);
    const int may_be_strict = same ? 0 : (which & kLow ? kLowStrict : 0) | (which & kHigh ? kHighStrict : 0);
    if (which == 0 || (which & kSame && !same) || strict & ~may_be_strict)
      return fail("there is no comparison with the ends " + std::to_string(op.ends));
    op.kv = term("an array of keys", p_.S);
    if (op.ends & kLow) op.low = op.high = term("an array of queries", p_.T);
    if (op.ends & kHigh && !same) op.high = term("an array of queries", p_.T);
    if (!(op.ends & kLow)) op.low = op.high;
  }

  void leaf(Op& op) {
    switch (op.code) {
      case kFull:
      case kEmpty: break;
      case kWithin: within(op); break;
      case kBlocks: blocks(op); break;
      case kDense: dense(op); break;
      case kDenseAt: dense_at(op); break;
      case kBits: bits(op); break;
      default: fail("unknown op " + std::to_string(op.code));
    }
  }

  void blocks(Op& op) {
    const Array a = operand("block table");
    op.block = word();
    if (error_.empty() && (a.type != I32 || a.rank != 4 || !one_or(a.dims[0], p_.B) || !one_or(a.dims[1], p_.N)))
      fail(bad("block table", "int32 [B or 1, N or 1, nq, r]", a));
    if (op.block < 1) fail("block size must be at least 1");
    op.table = static_cast<const int32_t*>(a.data);
    op.rows = a.dims[2];
    op.width = a.dims[3];
    op.head_stride = a.dims[1] > 1 ? a.dims[2] * a.dims[3] : 0;
    op.b_stride = a.dims[0] > 1 ? a.dims[1] * a.dims[2] * a.dims[3] : 0;
    p_.by_head |= a.dims[1] > 1;
  }

  void dense(Op& op) {
    const Array a = operand("dense mask");
    const int64_t full[4] = {p_.B, p_.N, p_.T, p_.S};
    bool ok = a.type == U8 && a.rank == 4;
    for (int i = 0; ok && i < 4; ++i) ok = one_or(a.dims[i], full[i]) || (i >= 2 && op.sides & (i - 1));
    if (error_.empty() && !ok) fail(bad("dense mask", "bool broadcastable to [B,N,T,S]", a));
    op.view.data = a.data;
    op.view.s = a.dims[3] > 1;
    op.view.t = a.dims[2] > 1 ? a.dims[3] : 0;
    op.view.n = a.dims[1] > 1 ? a.dims[2] * a.dims[3] : 0;
    op.view.b = a.dims[0] > 1 ? a.dims[1] * a.dims[2] * a.dims[3] : 0;
    op.rows = a.dims[2];
    op.width = a.dims[3];
    p_.by_head |= a.dims[1] > 1;
  }

  void dense_at(Op& op) {
    op.sides = word();
    if (op.sides < 0 || op.sides > 3) fail("sides with an offset are 0 to 3");
    dense(op);
    op.lo = number();
    op.hi = number();
  }

  void bits(Op& op) {
    const Array a = operand("bit tiles");
    const Layout& l = p_.layout;
    const Array& s = call_.starts;
    if (error_.empty() &&
        (a.type != U8 || !is_shape(a, {s.dims[0], s.dims[1], l.nq, a.dims[3], l.q_tile, (l.kv_tile + 7) / 8})))
      fail(bad("bit tiles", "uint8 [Bl,Nl,nq,visits,q_tile,kv_tile/8]", a));
    op.flags = static_cast<const uint8_t*>(a.data);
    op.width = a.dims[3];
    p_.has_bits = true;
    if (error_.empty() && most_visits() > op.width)
      fail("the layout visits " + std::to_string(most_visits()) + " tiles in a row, but bits are stored for " +
           std::to_string(op.width));
  }

  int64_t most_visits() const {
    const Layout& l = p_.layout;
    int64_t most = 0;
    for (int64_t row = 0; row < call_.starts.dims[0] * call_.starts.dims[1]; ++row)
      for (int64_t i = 0; i < l.nq; ++i) {
        const int32_t *from = l.starts + (row * l.nq + i) * l.intervals, *to = l.stops + (row * l.nq + i) * l.intervals;
        int64_t visits = 0;
        for (int64_t j = 0; j < l.intervals; ++j)
          visits += std::max<int64_t>(0, std::min<int64_t>(to[j], l.nkv) - std::max<int64_t>(from[j], 0));
        for (int64_t c = 0; l.columns && c < std::min<int64_t>(l.column_count[row], l.max_columns); ++c) {
          bool inside = false;
          for (int64_t j = 0; j < l.intervals; ++j) {
            const int32_t tile = l.columns[row * l.max_columns + c];
            inside |= tile >= from[j] && tile < to[j];
          }
          visits += !inside;
        }
        most = std::max(most, visits);
      }
    return most;
  }

  void decode(int64_t begin, int64_t end, int64_t base, int64_t& height) {
    at_ = begin;
    end_ = end;
    while (error_.empty() && at_ < end) {
      Op op;
      op.code = Code(word());
      if (op.code == kAnd || op.code == kOr) {
        if (--height < 1) fail("And/Or needs two values");
      } else if (op.code == kNot) {
        if (height < 1) fail("Not needs a value");
      } else if (op.code == kPerHead) {
        per_head(op, base, height, end);
        continue;
      } else {
        leaf(op);
        ++height;
      }
      if (base + height > kMaxStack) fail("needs a higher stack than " + std::to_string(kMaxStack));
      if (base + height > p_.depth) p_.depth = int(base + height);
      built_.ops.push_back(op);
    }
  }

  void per_head(Op& op, int64_t base, int64_t& height, int64_t end) {
    // Here and in the kernels each nested part is a recursion, and threads have small stacks.
    if (nested_ == kMaxNested) return fail("PerHead is nested deeper than " + std::to_string(kMaxNested));
    op.count = word();
    if (op.count < 1 || op.count > end - at_) return fail("PerHead needs at least one part");
    std::vector<int64_t> lengths(size_t(op.count), 0);
    for (int64_t& n : lengths) n = word();
    op.first = int64_t(built_.parts.size());
    built_.parts.resize(built_.parts.size() + size_t(op.count) + 1);
    const size_t self = built_.ops.size();
    built_.ops.push_back(op);
    int64_t at = at_;
    for (int64_t i = 0; i < op.count && error_.empty(); ++i) {
      if (lengths[size_t(i)] < 1 || lengths[size_t(i)] > end - at) return fail("a part of PerHead has a wrong length");
      built_.parts[size_t(op.first + i)] = int64_t(built_.ops.size());
      int64_t own = 0;
      if (base + height >= kMaxStack) return fail("PerHead is nested too deep");
      ++nested_;
      decode(at, at + lengths[size_t(i)], base + height, own);
      --nested_;
      if (error_.empty() && own != 1) return fail("a part of PerHead must leave one value");
      at += lengths[size_t(i)];
    }
    built_.parts[size_t(op.first + op.count)] = int64_t(built_.ops.size());
    built_.ops[self].next = int64_t(built_.ops.size());
    p_.by_head = true;
    at_ = at;
    end_ = end;
    ++height;
  }
};

// The keys or values of one layer in a stack, in place.
std::string take_layer(const Call& c, Array& a) {
  if (c.roles[kLayer] < 0) return "";
  const Array which = c.rest[size_t(c.roles[kLayer])];
  if (which.type != I32 || which.rank != 0) return bad("layer", "int32 []", which);
  if (a.rank != 5) return "k and v of layers must be [layers,B,S,K,H] or [layers,B,K,S,H], got " + shape_of(a);
  const int32_t layer = *static_cast<const int32_t*>(which.data);
  if (layer < 0 || layer >= a.dims[0]) return "there is no layer " + std::to_string(layer) + " in " + shape_of(a);
  int64_t bytes = a.type == F64 ? 8 : a.type == F32 ? 4 : 2;
  for (int i = 1; i < a.rank; ++i) bytes *= a.dims[i], a.dims[i - 1] = a.dims[i];
  --a.rank;
  a.data = static_cast<const char*>(a.data) + layer * bytes;
  return "";
}

std::string build_inputs(const Call& c, Problem& p) {
  Array k = c.k, v = c.v;
  for (Array* a : {&k, &v}) {
    const std::string error = take_layer(c, *a);
    if (!error.empty()) return error;
  }
  const std::string order = c.heads_first ? "[B,K,S,H]" : "[B,S,K,H]";
  if (c.q.rank != 4 || k.rank != 4)
    return "q must be [B,T,N,H] and k " + order + ", got " + shape_of(c.q) + " and " + shape_of(k);
  p.B = c.q.dims[0], p.T = c.q.dims[1], p.N = c.q.dims[2], p.H = c.q.dims[3];
  p.S = k.dims[c.heads_first ? 2 : 1], p.K = k.dims[c.heads_first ? 1 : 2];
  p.slot_step = c.heads_first ? 1 : p.K, p.head_step = c.heads_first ? p.S : 1;
  p.type = c.q.type;
  if (!is_float(p.type) || k.type != p.type || v.type != p.type)
    return "q, k and v must have one type: f32, f64, bf16 or f16";
  p.Hv = v.rank == 4 ? v.dims[3] : 0;
  if (!is_shape(k, {p.B, k.dims[1], k.dims[2], p.H}) || !is_shape(v, {p.B, k.dims[1], k.dims[2], p.Hv}))
    return "k and v must be " + order + " with q's B and H, got q " + shape_of(c.q) + ", k " + shape_of(k) + ", v " +
           shape_of(v);
  if (p.B < 1 || p.T < 1 || p.S < 1 || p.N < 1)
    return "B, T, S and N must be at least 1, got q " + shape_of(c.q) + ", k " + shape_of(k);
  if (p.K < 1 || p.N % p.K)
    return "q has " + std::to_string(p.N) + " heads, not a multiple of k's " + std::to_string(p.K);
  for (int64_t size : {p.H, p.Hv})
    if (size < 1 || size > kMaxHead) return "head size must be 1 to 256, got " + std::to_string(size);
  if (p.T > INT32_MAX || p.S > INT32_MAX) return "T and S must be below 2^31";
  if (!(c.scale == c.scale) || !(c.soft_cap >= 0)) return "scale must be a number and soft_cap at least 0";
  p.q = c.q.data, p.k = k.data, p.v = v.data;
  p.scale = c.scale;
  p.soft_cap = c.soft_cap;
  p.by_tiles = c.by_tiles;
  return "";
}

std::string build_layout(const Call& c, Problem& p) {
  Layout& l = p.layout;
  if (c.q_tile < 1 || c.kv_tile < 1 || c.q_tile > INT32_MAX || c.kv_tile > INT32_MAX)
    return "q_tile and kv_tile must be at least 1";
  l.q_tile = c.q_tile, l.kv_tile = c.kv_tile;
  l.nq = (p.T + l.q_tile - 1) / l.q_tile, l.nkv = (p.S + l.kv_tile - 1) / l.kv_tile;
  const Array &a = c.starts, &z = c.stops;
  if (a.type != I32 || z.type != I32 || a.rank != 4 || !one_or(a.dims[0], p.B) || !one_or(a.dims[1], p.N) ||
      a.dims[2] != l.nq || !is_shape(z, {a.dims[0], a.dims[1], a.dims[2], a.dims[3]}))
    return "starts and stops must be int32 [B or 1, N or 1, " + std::to_string(l.nq) + ", P], got " + shape_of(a) +
           " and " + shape_of(z);
  l.intervals = a.dims[3];
  l.starts = static_cast<const int32_t*>(a.data);
  l.stops = static_cast<const int32_t*>(z.data);
  l.n_stride = a.dims[1] > 1;
  l.b_stride = a.dims[0] > 1 ? a.dims[1] : 0;
  p.by_head |= a.dims[1] > 1;
  const int32_t columns = c.roles[kColumns], count = c.roles[kColumnCount];
  if ((columns < 0) != (count < 0)) return "columns and column_count belong together";
  if (columns < 0) return "";
  const Array &list = c.rest[size_t(columns)], &n = c.rest[size_t(count)];
  if (list.type != I32 || list.rank != 3 || list.dims[0] != a.dims[0] || list.dims[1] != a.dims[1] || n.type != I32 ||
      !is_shape(n, {a.dims[0], a.dims[1]}))
    return "columns must be int32 [Bl,Nl,C] and column_count int32 [Bl,Nl], got " + shape_of(list) + " and " +
           shape_of(n);
  l.columns = static_cast<const int32_t*>(list.data);
  l.column_count = static_cast<const int32_t*>(n.data);
  l.max_columns = list.dims[2];
  return "";
}

std::string build_extras(const Call& c, Problem& p) {
  const auto given = [&](Role r) { return c.roles[r] < 0 ? Array() : c.rest[size_t(c.roles[r])]; };
  if (c.roles[kBias] >= 0) {
    const Array a = given(kBias);
    const int64_t full[4] = {p.B, p.N, p.T, p.S};
    bool ok = a.rank == 4 && is_float(a.type);
    for (int i = 0; ok && i < 4; ++i) ok = one_or(a.dims[i], full[i]);
    if (!ok) return bad("bias", "a float array broadcastable to [B,N,T,S]", a);
    p.has_bias = true;
    p.bias = {a.data,
              a.type,
              a.dims[0] > 1 ? a.dims[1] * a.dims[2] * a.dims[3] : 0,
              a.dims[1] > 1 ? a.dims[2] * a.dims[3] : 0,
              a.dims[2] > 1 ? a.dims[3] : 0,
              a.dims[3] > 1};
  }
  if (c.roles[kTable] >= 0) {
    const Array a = given(kTable);
    if (a.rank != 2 || a.dims[0] != p.N || a.dims[1] % 2 != 1 || a.type != (p.type == F64 ? F64 : F32))
      return bad("table", "float32 (float64 for float64) [N, 2 * reach + 1]", a);
    p.has_bias = true;
    p.by_distance.table = a.data;
    p.by_distance.reach = a.dims[1] / 2;
  }
  if (c.roles[kSlopes] >= 0) {
    const Array a = given(kSlopes);
    if (!is_shape(a, {p.N}) || a.type != (p.type == F64 ? F64 : F32))
      return bad("slopes", "float32 (float64 for float64) [N]", a);
    p.by_distance.slopes = a.data;
  }
  if (c.roles[kSinks] >= 0) {
    const Array a = given(kSinks);
    if (!is_shape(a, {p.N}) || a.type != (p.type == F64 ? F64 : F32))
      return bad("sinks", "float32 (float64 for float64) [N]", a);
    p.sinks = a.data;
  }
  for (int side = 0; side < 2; ++side) {
    if (c.roles[side ? kKvPos : kQPos] < 0) continue;
    const Array a = given(side ? kKvPos : kQPos);
    const int64_t length = side ? p.S : p.T;
    if (a.type != I32 || a.rank != 2 || !one_or(a.dims[0], p.B) || a.dims[1] != length)
      return bad("positions", "int32 [B or 1, length]", a);
    (side ? p.kv_pos : p.q_pos) = static_cast<const int32_t*>(a.data);
    (side ? p.kv_pos_stride : p.q_pos_stride) = a.dims[0] > 1 ? length : 0;
  }
  if (c.roles[kRowIds] >= 0) {
    const Array a = given(kRowIds);
    if (a.type != I32 || !is_shape(a, {p.B})) return bad("row_ids", "int32 [B]", a);
    p.row_ids = static_cast<const int32_t*>(a.data);
  }
  if (c.roles[kHeadIds] >= 0) {
    const Array a = given(kHeadIds);
    if (a.type != I32 || !is_shape(a, {p.N})) return bad("head_ids", "int32 [N]", a);
    p.head_ids = static_cast<const int32_t*>(a.data);
  }
  if (c.roles[kSeed] >= 0) {
    const Array a = given(kSeed);
    if (a.type != U32 || !is_shape(a, {2})) return bad("seed", "uint32 [2]", a);
    if (!(c.dropout_rate >= 0 && c.dropout_rate < 1)) return "dropout rate must be in [0, 1)";
    const uint32_t* words = static_cast<const uint32_t*>(a.data);
    p.dropout = {true, {words[0], words[1]}, c.dropout_threshold, 1 / (1 - c.dropout_rate)};
  }
  return "";
}

Type stats(const Problem& p) { return p.type == F64 ? F64 : F32; }

bool is_rows(const Problem& p, const Array& a, int64_t size) {
  return a.type == p.type && is_shape(a, {p.B, p.T, p.N, size});
}
bool is_stats(const Problem& p, const Array& a) { return a.type == stats(p) && is_shape(a, {p.B, p.T, p.N}); }

}  // namespace

std::string build(const Call& call, Built& built) {
  if (call.roles.size() != kRoles) return "roles must have " + std::to_string(int(kRoles)) + " entries";
  for (int32_t r : call.roles)
    if (r < -1 || r >= int32_t(call.rest.size()))
      return "a role names operand " + std::to_string(r) + ", which is not there";
  Problem& p = built.problem;
  std::string error = build_inputs(call, p);
  if (error.empty()) error = build_layout(call, p);
  if (error.empty()) error = build_extras(call, p);
  if (error.empty()) error = Decoder(call, built).run();
  p.ops = built.ops.data();
  p.op_count = int64_t(built.ops.size());
  p.parts = built.parts.data();
  return error;
}

std::string check_forward(const Problem& p, const Array& out, const Array& lse, const Array& lse_low) {
  if (!is_shape(out, {p.B, p.T, p.N, p.Hv}) || (out.type != p.type && out.type != stats(p)))
    return bad("out", "[B,T,N,Hv] in q's type or lse's", out);
  for (const Array* a : {&lse, &lse_low})
    if (!is_stats(p, *a)) return bad("lse and lse_low", "float32 (float64 for float64) [B,T,N]", *a);
  return "";
}

std::string check_given(const Problem& p, const Given& given) {
  for (const Array* a : {&given.lse, &given.lse_low, &given.delta})
    if (!is_stats(p, *a)) return bad("lse, lse_low and delta", "float32 (float64 for float64) [B,T,N]", *a);
  return is_rows(p, given.dout, p.Hv) ? "" : bad("dout", "[B,T,N,Hv] in q's type", given.dout);
}

std::string check_backward(const Problem& p, const Given& given, const Array& dq, const Array& dk, const Array& dv,
                           const Array& scratch_dk, const Array& scratch_dv, Backward& g) {
  const std::string error = check_given(p, given);
  if (!error.empty()) return error;
  if (!is_rows(p, dq, p.H)) return bad("dq", "like q", dq);
  if (dk.type != p.type || !is_shape(dk, {p.B, p.S, p.K, p.H})) return bad("dk", "like k", dk);
  if (dv.type != p.type || !is_shape(dv, {p.B, p.S, p.K, p.Hv})) return bad("dv", "like v", dv);
  for (const Array* a : {&scratch_dk, &scratch_dv}) {
    const int64_t size = p.type == F64 ? 8 : 4, row = a == &scratch_dk ? p.H : p.Hv;
    const int64_t padded = (row * size + kPadBytes - 1) / kPadBytes * kPadBytes / size;
    if (a->type != stats(p) || a->rank != 4 || scratch_dk.dims[2] < p.S ||
        !is_shape(*a, {p.B, p.K, scratch_dk.dims[2], padded}))
      return bad("scratch", "float32 (float64 for float64) [B,K,at least S," + std::to_string(padded) + "]", *a);
  }
  g.lse = given.lse.data, g.lse_low = given.lse_low.data, g.dout = given.dout.data, g.delta = given.delta.data;
  g.rows = scratch_dk.dims[2];
  return "";
}

std::string check_slope_gradient(const Problem& p, const Array& dslopes) {
  if (!p.by_distance.slopes) return "there are no slopes";
  return is_stats(p, dslopes) ? "" : bad("dslopes", "float32 (float64 for float64) [B,T,N]", dslopes);
}

std::string check_bias_gradient(const Problem& p, const Call& call, const Given& given, const Array& dbias,
                                const Array& scratch, BiasGradient& g) {
  const int32_t role = call.roles[call.of_table ? kTable : kBias];
  if (role < 0) return "there is no bias";
  const std::string error = check_given(p, given);
  if (!error.empty()) return error;
  Array bias = call.rest[size_t(role)];
  if (call.of_table) bias.dims[3] = bias.dims[1], bias.dims[2] = 1, bias.dims[1] = p.N, bias.dims[0] = 1;
  g.of_table = call.of_table;
  if (dbias.type != stats(p) || !is_shape(dbias, {bias.dims[0], bias.dims[1], bias.dims[2], bias.dims[3]}))
    return bad("dbias", "float32 (float64 for float64) in bias's shape", dbias);
  for (int i = 0; i < 4; ++i) g.dims[i] = bias.dims[i];
  if (scratch.type != stats(p) || scratch.rank != 5 || (bias.dims[2] == 1 && p.T > 1 && scratch.dims[0] < 1) ||
      !is_shape(scratch, {scratch.dims[0], bias.dims[0], bias.dims[1], bias.dims[2], bias.dims[3]}))
    return bad("scratch", "float32 (float64 for float64) [chunks, *bias's shape]", scratch);
  g.lse = given.lse.data, g.lse_low = given.lse_low.data, g.dout = given.dout.data, g.delta = given.delta.data;
  g.chunks = scratch.dims[0];
  return "";
}

}  // namespace longspan
