// From memory to tiles: conversions, packing of queries into lanes, copies of key and value rows, the walk over the
// layout, bias tiles.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "mask.h"
#include "problem.h"
#include "simd.h"

namespace longspan::LONGSPAN_ISA {
namespace {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

static inline float from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }
static inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

// Uses no denormal floats, because the thread may flush them to zero.
static inline float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, em = uint32_t(h & 0x7FFF) << 13;
  const float normal = float_of(em + (112u << 23));
  const float small = float_of(em + (113u << 23)) - float_of(113u << 23);
  const float special = float_of(em + (224u << 23));
  const float x = em >= (0x7C00u << 13) ? special : em < (0x400u << 13) ? small : normal;
  return float_of(bits_of(x) | sign);
}

static inline uint16_t to_f16(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, a = u & 0x7FFFFFFF;
  if (a > 0x7F800000) return uint16_t(sign | 0x7E00 | (a >> 13 & 0x1FF));
  if (a >= 0x477FF000) return uint16_t(sign | 0x7C00);
  if (a < 0x38800000) {  // below 2^-14: adding 0.5 leaves the halves' subnormal bits, rounded, at the bottom
    return uint16_t(sign | (bits_of(float_of(a) + 0.5f) - 0x3F000000));
  }
  return uint16_t(sign | ((a + 0xFFF + ((a >> 13) & 1) - (112u << 23)) >> 13));
}

template <class R> static inline R element(const void* data, Type type, int64_t i) {
  switch (type) {
    case F32: return R(static_cast<const float*>(data)[i]);
    case F64: return R(static_cast<const double*>(data)[i]);
    case BF16: return R(from_bf16(static_cast<const uint16_t*>(data)[i]));
    default: return R(from_f16(static_cast<const uint16_t*>(data)[i]));
  }
}

template <class R>
static inline void read_row(R* __restrict out, const void* data, Type type, int64_t at, int64_t count) {
  if (type == F32) {
    const float* __restrict x = static_cast<const float*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = R(x[i]);
  } else if (type == F64) {
    const double* __restrict x = static_cast<const double*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = R(x[i]);
  } else if (type == BF16) {
    const uint16_t* __restrict x = static_cast<const uint16_t*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = R(from_bf16(x[i]));
  } else {
    const uint16_t* __restrict x = static_cast<const uint16_t*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = R(from_f16(x[i]));
  }
}

template <class R>
static inline void write_row(void* data, Type type, int64_t at, const R* __restrict x, int64_t count) {
  if (type == F32) {
    float* __restrict out = static_cast<float*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = float(x[i]);
  } else if (type == F64) {
    double* __restrict out = static_cast<double*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = double(x[i]);
  } else {
    uint16_t* __restrict out = static_cast<uint16_t*>(data) + at;
    for (int64_t i = 0; i < count; ++i) out[i] = type == BF16 ? to_bf16(float(x[i])) : to_f16(float(x[i]));
  }
}

static inline int64_t size_of(Type type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

// Splits one thread's scratch into aligned parts. With a null base it only adds up their sizes.
struct Arena {
  char* base;
  size_t used = 0;
  template <class A> A* take(int64_t count) {
    used = (used + 63) / 64 * 64;
    A* p = reinterpret_cast<A*>(base + used);
    used += sizeof(A) * size_t(count);
    return p;
  }
};

// The queries of a tile: `rows` rows of T for each of `heads` heads that share a kv head, lane = head * rows + row.
struct QueryTile {
  int64_t b, n, t;
  int heads, rows;
  int64_t layout_tile;
  int lanes() const { return heads * rows; }
  int64_t head(int lane) const { return n + lane / rows; }
  int64_t row(int lane) const { return t + lane % rows; }
  int64_t offset(const Problem& p, int lane) const { return (b * p.T + row(lane)) * p.N + head(lane); }
};

// rows[lane][width] = factor * x[b, t, n, :]; lanes beyond the tile and columns beyond `size` are zero.
template <class R>
static void read_queries(R* rows, int64_t width, const Problem& p, const void* data, int64_t size,
                         const QueryTile& tile, R factor) {
  for (int lane = 0; lane < kLanes; ++lane) {
    R* row = rows + lane * width;
    int64_t h = 0;
    if (lane < tile.lanes()) {
      read_row(row, data, p.type, tile.offset(p, lane) * size, size);
      for (; h < size; ++h) row[h] *= factor;
    }
    for (; h < width; ++h) row[h] = 0;
  }
}

// panels[panel][h][lane] = rows[lane][h].
template <class R, int PANEL>
static void to_panels(R* __restrict panels, const R* __restrict rows, int64_t width, int64_t H, int lanes) {
  constexpr int L = Simd<R>::lanes;
  const int whole = (lanes + PANEL - 1) / PANEL * PANEL;  // dk and dv add up all lanes of a panel
  for (int lane = 0; lane < whole; lane += L) {
    R* out = panels + lane / PANEL * H * PANEL + lane % PANEL;
    for (int64_t h = 0; h < H; h += L) {  // rows are as wide as whole vectors
      Vec<R> x[L];
      for (int i = 0; i < L; ++i) x[i] = load(rows + (lane + i) * width + h);
      transpose<R>(x);
      for (int i = 0; i < L && h + i < H; ++i) store(out + (h + i) * PANEL, x[i]);
    }
  }
}

// rows[lane][h] = panels[panel][h][lane] / divisor of the lane, or 0 where the divisor is 0.
template <class R, int PANEL>
static void from_panels(R* __restrict rows, const R* __restrict panels, const R* __restrict divisors, int64_t width,
                        int64_t H, int lanes) {
  constexpr int L = Simd<R>::lanes;
  for (int lane = 0; lane < lanes; lane += L) {
    const Vec<R> divisor = load(divisors + lane), factor = R(1) / divisor;
    const R* in = panels + lane / PANEL * H * PANEL + lane % PANEL;
    for (int64_t h = 0; h < H; h += L) {
      Vec<R> x[L];
      for (int i = 0; i < L; ++i) {
        const Vec<R> y = h + i < H ? load(in + (h + i) * PANEL) : splat(R(0));
        x[i] = divisor == R(0) ? splat(R(0)) : y * factor;
      }
      transpose<R>(x);
      for (int i = 0; i < L; ++i) store(rows + (lane + i) * width + h, x[i]);
    }
  }
}

// Copies the key or value rows of a tile, with zeros for rows not `seen` (null: all are seen). Returns whether all rows
// are finite.
template <class R>
static bool copy_keys(R* out, int64_t width, const Problem& p, const void* data, int64_t size, int64_t b, int64_t head,
                      int64_t s0, int count, const uint8_t* seen) {
  constexpr Type same = sizeof(R) == 4 ? F32 : F64;
  constexpr int L = Simd<R>::lanes;
  typename Simd<R>::I bad = {};
  for (int s = 0; s < count; ++s) {
    R* row = out + s * width;
    const int64_t at = p.kv_row(b, s0 + s, head) * size;
    if (seen && !seen[s]) {
      __builtin_memset(row, 0, sizeof(R) * size_t(width));
    } else if (p.type == same && size % L == 0) {
      for (int64_t h = 0; h < width; h += L) {
        const Vec<R> x = loose(static_cast<const R*>(data) + at + h);
        bad |= not_finite<R>(x);
        store(row + h, x);
      }
    } else {
      read_row(row, data, p.type, at, size);
      for (int64_t h = size; h < width; ++h) row[h] = 0;
      for (int64_t h = 0; h < width; h += L) bad |= not_finite<R>(load(row + h));
    }
  }
  return !any_of<R>(bad);
}

// Large enough to amortise the update of the output, small enough that k, v and a panel fit into the cache.
static inline int64_t keys_per_tile(const Problem& p) { return p.H + p.Hv <= 256 ? kKeys : kKeys / 2; }

// The size of a row of `size` elements, padded to whole vectors.
template <class R>
static inline int64_t padded_width(int64_t size) {
  constexpr int L = Simd<R>::lanes;
  return (size + L - 1) / L * L;
}

// A run of at most `keys` keys that is computed at once; with bit tiles, all in one tile of the layout.
struct Piece {
  int64_t first, kv_tile, visit;
  int count;
};

// Prefetches the next rows, a few between every two blocks of a product: hardware prefetchers do not follow rows that
// are far apart, and many prefetches at once would stall. They go to the L2 cache, because this piece fills L1.
struct Ahead {
  struct Rows {
    const char* at = nullptr;
    int64_t stride = 0, bytes = 0;

    void next() {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
      at += stride;
    }
  };
  Rows k, v;
  int64_t rows = 0, each = 1;

  void operator()() {
    for (int64_t i = 0; i < each && rows > 0; ++i, --rows) k.next(), v.next();
  }
};

// Copies of the keys and values of one kv head, made once for the several tiles of queries that see them. The copy pays
// off: rows of one head are far apart, often by a power of two, so that in place they would share few cache sets and
// need one page each. A head that fits is kept whole; of a longer one, the pieces that neighbouring tiles share.
template <class R>
struct KeyCache {
  static constexpr int64_t kMostBytes = 4 << 20, kShared = 16;
  const Problem* p;
  int64_t width, v_width, keys, slots;
  R *k, *v;        // [slots + 1][keys][width, v_width]; the last entry is for pieces with zeroed rows
  int64_t* first;  // the first kv slot of each entry, or -1
  int* count;
  uint8_t* finite;

  void take(Arena& arena, const Problem& problem, int64_t most, bool reused) {
    p = &problem;
    width = padded_width<R>(p->H);
    v_width = padded_width<R>(p->Hv);
    keys = most;
    const int64_t pieces = (problem.S + keys - 1) / keys, bytes = keys * (width + v_width) * int64_t(sizeof(R));
    slots = !reused ? 1 : pieces * bytes <= kMostBytes ? pieces : kShared;
    k = arena.take<R>((slots + 1) * keys * width);
    v = arena.take<R>((slots + 1) * keys * v_width);
    first = arena.take<int64_t>(slots);
    count = arena.take<int>(slots);
    finite = arena.take<uint8_t>(slots);
  }
  void clear() {
    for (int64_t i = 0; i < slots; ++i) first[i] = -1;
  }
  bool has(const Piece& piece) const {
    const int64_t i = piece.first / keys % slots;
    return first[i] == piece.first && count[i] >= piece.count;
  }
  // The rows of a piece in memory, to be prefetched in about `steps` steps.
  Ahead ahead(int64_t b, int64_t head, const Piece& piece, int64_t steps) const {
    const int64_t each = 1 + piece.count / greater<int64_t>(1, steps);
    if (has(piece)) {
      const int64_t at = piece.first / keys % slots * keys;
      return {copied(k, at, width), copied(v, at, v_width), piece.count, each};
    }
    const int64_t at = p->kv_row(b, piece.first, head);
    return {given(p->k, at, p->H), given(p->v, at, p->Hv), piece.count, each};
  }
  static Ahead::Rows copied(const R* rows, int64_t at, int64_t row) {
    const int64_t bytes = row * int64_t(sizeof(R));
    return {reinterpret_cast<const char*>(rows) + at * bytes, bytes, bytes};
  }
  Ahead::Rows given(const void* data, int64_t at, int64_t size) const {
    const int64_t bytes = size * size_of(p->type);
    return {static_cast<const char*>(data) + at * bytes, p->slot_step * bytes, bytes};
  }
  // Points to the rows of a piece. Rows that no query of the tile sees are zeroed if they hold NaN or infinity. Finite
  // values have no effect there, because their weight is 0.
  void get(const R*& k_rows, const R*& v_rows, int64_t b, int64_t head, const Piece& piece, bool partial,
           const uint8_t* seen) {
    const int64_t s0 = piece.first;
    const int n = piece.count;
    int64_t i = s0 / keys % slots;
    if (!has(piece)) {
      const bool k_finite = copy_keys(k + i * keys * width, width, *p, p->k, p->H, b, head, s0, n, nullptr);
      const bool v_finite = copy_keys(v + i * keys * v_width, v_width, *p, p->v, p->Hv, b, head, s0, n, nullptr);
      first[i] = s0, count[i] = n, finite[i] = k_finite && v_finite;
    }
    if (partial && !finite[i]) {
      i = slots;
      copy_keys(k + i * keys * width, width, *p, p->k, p->H, b, head, s0, n, seen);
      copy_keys(v + i * keys * v_width, v_width, *p, p->v, p->Hv, b, head, s0, n, seen);
    }
    k_rows = k + i * keys * width;
    v_rows = v + i * keys * v_width;
  }
};

// Walks over the kv slots that a q tile visits: its intervals, then the common columns outside them. Neighbouring tiles
// are merged, unless the mask has bit tiles, which are stored by visit.
struct Walk {
  const Layout* l;
  bool single;
  const int32_t *starts, *stops, *columns;
  int64_t column_count, S;
  int64_t interval = 0, inside = -1, column = 0, visits = 0;

  Walk(const Problem& p, const QueryTile& tile) : l(&p.layout), single(p.has_bits), S(p.S) {
    const int64_t row = layout_row(p, tile.b, tile.n);
    starts = l->starts + (row * l->nq + tile.layout_tile) * l->intervals;
    stops = l->stops + (row * l->nq + tile.layout_tile) * l->intervals;
    columns = l->columns ? l->columns + row * l->max_columns : nullptr;
    column_count = columns ? lesser<int64_t>(l->column_count[row], l->max_columns) : 0;
  }
  static int64_t layout_row(const Problem& p, int64_t b, int64_t n) {
    return b * p.layout.b_stride + n * p.layout.n_stride;
  }
  int64_t start(int64_t i) const { return greater<int64_t>(0, starts[i]); }
  int64_t stop(int64_t i) const { return lesser<int64_t>(l->nkv, stops[i]); }
  bool covered(int64_t tile) const {
    for (int64_t i = 0; i < l->intervals; ++i)
      if (tile >= start(i) && tile < stop(i)) return true;
    return false;
  }
  // The next kv slots [lo, hi), their first tile, its visit number, and its column (-1: it is in an interval).
  bool next(int64_t& lo, int64_t& hi, int64_t& tile, int64_t& visit, int64_t& as_column) {
    int64_t first, last;
    as_column = -1;
    for (;;) {
      if (interval < l->intervals) {
        first = inside >= 0 ? inside : start(interval);
        last = stop(interval);
        inside = -1;
        if (first >= last) {
          ++interval;
          continue;
        }
        if (single) {
          inside = first + 1;
          last = first + 1;
          break;
        }
        ++interval;
        while (interval < l->intervals && start(interval) == last && stop(interval) > last) last = stop(interval++);
        break;
      }
      if (column >= column_count) return false;
      as_column = column;
      first = columns[column++];
      if (first < 0 || first >= l->nkv || covered(first)) continue;
      last = first + 1;
      while (!single && column < column_count && columns[column] == last && last < l->nkv && !covered(last))
        ++column, ++last;
      break;
    }
    tile = first;
    visit = visits;
    visits += last - first;
    lo = first * l->kv_tile;
    hi = lesser(S, last * l->kv_tile);
    return true;
  }
};

// The visited keys in [from, to), in pieces that begin at multiples of `keys`.
struct Pieces {
  Walk walk;
  int64_t keys, from, to, lo = 0, hi = 0, kv_tile = 0, visit = 0;

  Pieces(const Problem& p, const QueryTile& tile, int64_t most, int64_t begin, int64_t end)
      : walk(p, tile), keys(most), from(begin), to(end) {}

  bool next(Piece& piece) {
    for (int64_t column; lo >= hi;) {
      if (!walk.next(lo, hi, kv_tile, visit, column)) return false;
      lo = greater(lo, from);
      hi = lesser(hi, to);
    }
    piece = {lo, kv_tile, visit, int(lesser(keys - lo % keys, hi - lo))};
    lo += piece.count;
    return true;
  }
};

// The size and number of the query tiles. They depend on shapes only.
struct Tiling {
  int64_t rows_per_tile, tiles_per_layout_tile, heads, groups;
  int64_t per_head;  // tiles along T

  explicit Tiling(const Problem& p) {
    const int64_t share = p.N / p.K;
    const int64_t rows = lesser(p.layout.q_tile, p.T);
    rows_per_tile = lesser<int64_t>(rows, kLanes);
    tiles_per_layout_tile = (rows + rows_per_tile - 1) / rows_per_tile;
    per_head = p.layout.nq * tiles_per_layout_tile;
    heads = p.by_head ? 1 : lesser<int64_t>(share, greater<int64_t>(1, kLanes / rows_per_tile));
    while (share % heads) --heads;
    groups = p.N / heads;
  }
  // Tile `i` along T of head group `g`; false if it lies beyond T.
  bool at(const Problem& p, int64_t b, int64_t g, int64_t i, QueryTile& tile) const {
    tile.b = b;
    tile.n = g * heads;
    tile.heads = int(heads);
    tile.layout_tile = i / tiles_per_layout_tile;
    const int64_t begin = tile.layout_tile * p.layout.q_tile + i % tiles_per_layout_tile * rows_per_tile;
    const int64_t end = lesser(lesser(begin + rows_per_tile, (tile.layout_tile + 1) * p.layout.q_tile), p.T);
    tile.t = begin;
    tile.rows = int(end - begin);
    return begin < end;
  }
};

// The mask of one tile for all its lanes; a bias of -inf masks a pair.
template <class R, int PANEL>
struct Masker {
  const Problem* p;
  const QueryTile* tile;
  Side q, kv;
  uint8_t valid[kLanes];
  Row* stack;
  R* bias;  // [kKeys][kLanes]
  TileMask<PANEL> mask;

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    stack = arena.take<Row>(int64_t(problem.depth) * kKeys);
    bias = problem.has_bias ? arena.take<R>(kKeys * kLanes) : nullptr;
  }

  void begin(const QueryTile& t) {
    tile = &t;
    __builtin_memset(q.pos, 0, sizeof q.pos);
    read_side(q, p->q_pos ? p->q_pos + t.b * p->q_pos_stride : nullptr, t.t, t.rows);
    for (int i = 0; i < kLanes; ++i) valid[i] = i < t.lanes() ? 0xFF : 0;
  }

  // Returns whether -inf masks some pair.
  bool read_bias() {
    if (p->bias.data)
      read_array();
    else
      __builtin_memset(bias, 0, sizeof(R) * size_t(kv.count * kLanes));
    for (int head = 0; p->by_distance.table && head < tile->heads; ++head) add_table(head);
    typename Simd<R>::I forbidden = {};
    for (int i = 0; i < kv.count * kLanes; i += Simd<R>::lanes) forbidden |= load(bias + i) == -kInf<R>;
    return any_of<R>(forbidden);
  }

  // A row of the bias runs along keys, but lanes are queries: whole vectors of rows are transposed.
  void read_array() {
    constexpr int L = Simd<R>::lanes;
    alignas(64) R rows[L][kKeys];
    for (int lane = 0; lane < kLanes; lane += L) {
      for (int i = 0; i < L; ++i) read_bias_row(rows[i], lane + i);
      for (int s = 0; s < kv.count; s += L) {
        Vec<R> x[L];
        for (int i = 0; i < L; ++i) x[i] = load(rows[i] + s);
        transpose<R>(x);
        for (int i = 0; i < L; ++i) store(bias + (s + i) * kLanes + lane, x[i]);
      }
    }
  }

  void read_bias_row(R* row, int lane) {
    const int whole = (kv.count + Simd<R>::lanes - 1) / Simd<R>::lanes * Simd<R>::lanes;
    const View4& v = p->bias;
    int s = 0;
    if (lane < tile->lanes()) {
      const int64_t at = tile->b * v.b + tile->head(lane) * v.n + tile->row(lane) * v.t + kv.first * v.s;
      const R first = v.s ? R(0) : element<R>(v.data, v.type, at);
      if (v.s) read_row(row, v.data, v.type, at, kv.count);
      for (; s < kv.count; ++s) row[s] = v.s ? row[s] : first;
    }
    for (; s < whole; ++s) row[s] = 0;
  }

  void add_table(int head) {
    const int64_t reach = p->by_distance.reach;
    const R* table = static_cast<const R*>(p->by_distance.table) + (tile->n + head) * (2 * reach + 1);
    R* out = bias + head * tile->rows;
    if (!q.steps || !kv.steps) {
      for (int s = 0; s < kv.count; ++s)
        for (int row = 0; row < tile->rows; ++row) out[s * kLanes + row] += table[table_place(row, s)];
      return;
    }
    // Positions increase by one on both sides, so the row of a key is the row of the previous key, shifted by one.
    R line[kLanes + kKeys];
    const int last = kv.count - 1, rows = tile->rows;
    for (int s = 0; s < last; ++s) line[s] = table[table_place(0, last - s)];
    for (int row = 0; row < rows; ++row) line[last + row] = table[table_place(row, 0)];
    for (int s = 0; s < kv.count; ++s)
      for (int row = 0; row < rows; ++row) out[s * kLanes + row] += line[last - s + row];
  }

  // The index into a head's table for a query and a key of the tile.
  int64_t table_place(int row, int s) const {
    const int64_t reach = p->by_distance.reach, ahead = int64_t(kv.pos[s]) - q.pos[row];
    return reach + greater(-reach, lesser(reach, ahead));
  }

  void repeat_heads() {
    for (int s = 0; s < kv.count; ++s)
      for (int j = 1; j < tile->heads; ++j) __builtin_memcpy(stack[s] + j * tile->rows, stack[s], size_t(tile->rows));
  }

  // Returns false if the tile has no allowed pair.
  bool read(const Piece& piece) {
    const int keys = piece.count;
    read_side(kv, p->kv_pos ? p->kv_pos + tile->b * p->kv_pos_stride : nullptr, piece.first, keys);
    const int64_t row = Walk::layout_row(*p, tile->b, tile->n);
    const TileAt at = {p, tile->b, tile->n, &q, &kv, row, tile->layout_tile, piece.visit, piece.kv_tile};
    const Truth r = classify(*p, 0, p->op_count, at);
    if (!r.any) return false;
    Kind kind = r.all ? kIsFull : evaluate(*p, 0, p->op_count, at, stack);
    if (kind == kIsEmpty) return false;
    if (kind == kIsPartial && tile->heads > 1) repeat_heads();
    if (p->has_bias && read_bias()) {
      if (kind == kIsFull) __builtin_memset(stack, 0xFF, sizeof(Row) * size_t(keys));
      uint8_t* bytes = stack[0];
      for (int i = 0; i < keys * kLanes; ++i) bytes[i] &= bias[i] == -kInf<R> ? 0 : 0xFF;
      kind = kIsPartial;
    }
    mask.bytes = stack;
    if (kind == kIsFull)
      all_allowed(mask, keys, tile->lanes());
    else
      summarize(mask, keys, tile->lanes(), valid);
    return mask.kind != kIsEmpty;
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
