// The backward pass: recomputes the score tiles, then computes five products per tile, in one pass over the queries. dq
// is summed per tile of queries. dk and dv are summed in a buffer for each chunk of the queries of a kv head, and the
// chunks are added in a fixed order afterwards. The number of chunks depends on shapes, never on threads.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "distance.h"
#include "dropout.h"
#include "gemm.h"
#include "isa.h"
#include "problem.h"
#include "simd.h"
#include "tile.h"

namespace longspan::LONGSPAN_ISA {
namespace {

// The size of a row of scratch_dk or scratch_dv, in elements.
template <class R>
static inline int64_t scratch_width(int64_t size) {
  return (size * int64_t(sizeof(R)) + kPadBytes - 1) / kPadBytes * kPadBytes / int64_t(sizeof(R));
}

template <class R>
struct BackwardTile {
  static constexpr int NV = 2, L = Simd<R>::lanes, PANEL = NV * L;
  const Problem* p;
  Masker<R, PANEL> masker;
  R *q_rows, *do_rows, *q, *dout, *dq;  // rows [kLanes][width]; panels [panel][H][PANEL]
  KeyCache<R> cache;
  const R *k, *v;     // the tile's keys and values [keys][width]
  R *w, *ds, *slope;  // weights, their gradients, the derivative of soft_cap [keys][kLanes]
  R *lse, *lse_low, *delta;
  R* far;  // with slopes: for each lane, the sum of score gradients times distances
  int64_t width, v_width, keys;
  DropoutLanes drop;
  SlopeLanes<R> slopes;
  bool garbage;  // whether some row of q or dout is not finite
  uint8_t bad[kLanes];
  const Backward* g;

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    width = padded_width<R>(p->H);
    v_width = padded_width<R>(p->Hv);
    keys = keys_per_tile(problem);
    masker.take(arena, problem);
    q_rows = arena.take<R>(kLanes * width);
    do_rows = arena.take<R>(kLanes * v_width);
    q = arena.take<R>(kLanes * problem.H);
    dout = arena.take<R>(kLanes * problem.Hv);
    dq = arena.take<R>(kLanes * problem.H);
    cache.take(arena, problem, keys, Tiling(problem).per_head > 1);
    w = arena.take<R>(keys * kLanes);
    ds = arena.take<R>(keys * kLanes);
    slope = problem.soft_cap != 0 ? arena.take<R>(keys * kLanes) : nullptr;
    lse = arena.take<R>(kLanes);
    lse_low = arena.take<R>(kLanes);
    delta = arena.take<R>(kLanes);
    far = problem.by_distance.slopes ? arena.take<R>(kLanes) : nullptr;
  }

  template <class Given>
  void begin(const QueryTile& tile, const Given& given) {
    masker.begin(tile);
    read_queries(q_rows, width, *p, p->q, p->H, tile, R(p->scale));
    read_queries(do_rows, v_width, *p, given.dout, p->Hv, tile, R(1));
    to_panels<R, PANEL>(q, q_rows, width, p->H, tile.lanes());
    to_panels<R, PANEL>(dout, do_rows, v_width, p->Hv, tile.lanes());
    const int panels = (tile.lanes() + PANEL - 1) / PANEL;
    __builtin_memset(dq, 0, sizeof(R) * size_t(panels * PANEL * p->H));
    for (int i = 0; i < kLanes; ++i) {
      const bool inside = i < tile.lanes();
      lse[i] = inside ? static_cast<const R*>(given.lse)[tile.offset(*p, i)] : R(0);
      lse_low[i] = inside ? static_cast<const R*>(given.lse_low)[tile.offset(*p, i)] : R(0);
      delta[i] = inside ? static_cast<const R*>(given.delta)[tile.offset(*p, i)] : R(0);
    }
    find_garbage();
    if (p->dropout.on) drop.begin(*p, tile, masker.q);
    if (p->by_distance.slopes) {
      slopes.begin(*p, tile, masker.q);
      __builtin_memset(far, 0, sizeof(R) * kLanes);
    }
  }

  // dk and dv sum over queries, where 0 * NaN would spread: rows that are not finite are recorded.
  void find_garbage() {
    garbage = false;
    for (int i = 0; i < kLanes; ++i) {
      typename Simd<R>::I some = {};
      for (int64_t h = i * width; h < (i + 1) * width; h += L) some |= not_finite<R>(load(q_rows + h));
      for (int64_t h = i * v_width; h < (i + 1) * v_width; h += L) some |= not_finite<R>(load(do_rows + h));
      bad[i] = any_of<R>(some);
      garbage |= bad[i] != 0;
    }
  }

  // Recorded rows take part in this tile only if they see one of its keys.
  void hide_garbage(const QueryTile& tile, const void* all_dout) {
    const TileMask<PANEL>& m = masker.mask;
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      if (!bad[lane]) continue;
      bool sees = m.kind == kIsFull;
      for (int s = m.lo; s < m.hi && !sees; ++s) sees = m.bytes[s][lane] != 0;
      const int64_t at = tile.offset(*p, lane);
      for (int64_t h = 0; h < p->H; ++h)
        q_rows[lane * width + h] = sees ? R(p->scale) * element<R>(p->q, p->type, at * p->H + h) : R(0);
      for (int64_t h = 0; h < p->Hv; ++h)
        do_rows[lane * v_width + h] = sees ? element<R>(all_dout, p->type, at * p->Hv + h) : R(0);
    }
  }

  // Computes w (weights after dropout) and ds (score gradients, before the derivative of soft_cap) for one panel.
  void scores(int panel) {
    const TileMask<PANEL>& m = masker.mask;
    const int first = m.first[panel], count = m.last[panel] - first;
    R *wp = w + first * kLanes + panel * PANEL, *dp = ds + first * kLanes + panel * PANEL;
    gemm<R, NV, false, kStore>(count, p->H, k + first * width, width, q + panel * p->H * PANEL, PANEL, wp, kLanes);
    gemm<R, NV, false, kStore>(count, p->Hv, v + first * v_width, v_width, dout + panel * p->Hv * PANEL, PANEL, dp,
                               kLanes);
    if (p->soft_cap != 0) soften(panel, first, count);
    if (p->has_bias) add_bias(panel, first, count);
    if (p->by_distance.slopes) slopes.add(wp, kLanes, NV, panel * PANEL, masker.kv.pos + first, count);
    if (m.exact[panel])
      p->dropout.on ? weigh<false, true>(panel, first, count) : weigh<false, false>(panel, first, count);
    else
      p->dropout.on ? weigh<true, true>(panel, first, count) : weigh<true, false>(panel, first, count);
  }

  void soften(int panel, int first, int count) {
    const R cap = R(p->soft_cap), inverse = R(1 / p->soft_cap);
    for (int i = first; i < first + count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const int64_t at = i * kLanes + panel * PANEL + j;
        const Vec<R> t = vtanh(load(w + at) * inverse);
        store(w + at, cap * t);
        store(slope + at, R(1) - t * t);
      }
  }

  void add_bias(int panel, int first, int count) {
    for (int i = first; i < first + count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const int64_t at = i * kLanes + panel * PANEL + j;
        store(w + at, load(w + at) + load(masker.bias + at));
      }
  }

  template <bool MASKED, bool DROP>
  __attribute__((noinline)) void weigh(int panel, int first, int count) {
    const int last = first + count;
    int i = first;
    for (; i + 2 <= last; i += 2) weigh_keys<2, MASKED, DROP>(panel * PANEL, i);
    for (; i < last; ++i) weigh_keys<1, MASKED, DROP>(panel * PANEL, i);
  }

  template <int KEYS, bool MASKED, bool DROP>
  inline __attribute__((always_inline)) void weigh_keys(int panel_lane, int first) {
    const R factor = R(p->dropout.inverse_keep);
    Vec<R> weights[KEYS * NV];
    for (int n = 0; n < KEYS * NV; ++n) {
      const int lane = panel_lane + n % NV * L;
      weights[n] = (load(w + (first + n / NV) * kLanes + lane) - load(lse + lane)) - load(lse_low + lane);
    }
    exp_each<KEYS * NV>(weights);
    for (int n = 0; n < KEYS * NV; ++n) {
      const int i = first + n / NV, lane = panel_lane + n % NV * L;
      R *wp = w + i * kLanes + lane, *dp = ds + i * kLanes + lane;
      Vec<R> grad = load(dp), kept = weights[n];
      if (DROP) {
        const auto keep = drop.template keep<R>(lane, masker.kv.pos[i]);
        grad = keep ? grad * factor : splat(R(0));
        kept = keep ? kept * factor : splat(R(0));
      }
      grad = weights[n] * (grad - load(delta + lane));
      if (MASKED) {
        const auto allowed = lanes_of<R>(masker.mask.bytes[i] + lane);
        kept = allowed ? kept : splat(R(0));
        grad = allowed ? grad : splat(R(0));
      }
      store(wp, kept);
      store(dp, grad);
    }
  }

  void apply_slope(int panel) {
    const TileMask<PANEL>& m = masker.mask;
    for (int i = m.first[panel]; i < m.last[panel]; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const int64_t at = i * kLanes + panel * PANEL + j;
        Vec<R> x = load(ds + at) * load(slope + at);
        // The score of a masked pair may be NaN, and so may its derivative.
        if (!m.exact[panel]) x = lanes_of<R>(m.bytes[i] + panel * PANEL + j) ? x : splat(R(0));
        store(ds + at, x);
      }
  }

  // Keys outside a panel's range have weight 0; they are read because other panels of the tile see them.
  void clear_outside(int panel) {
    const TileMask<PANEL>& m = masker.mask;
    for (int i = m.lo; i < m.hi; ++i)
      if (i < m.first[panel] || i >= m.last[panel])
        for (int j = 0; j < PANEL; j += L) {
          store(w + i * kLanes + panel * PANEL + j, Vec<R>{});
          store(ds + i * kLanes + panel * PANEL + j, Vec<R>{});
        }
  }

  void read_keys(const QueryTile& tile, const Piece& piece) {
    const TileMask<PANEL>& m = masker.mask;
    cache.get(k, v, tile.b, tile.n / (p->N / p->K), piece, m.kind == kIsPartial, m.seen);
  }

  // One piece: adds to dq, and to dk and dv of its keys.
  void visit_keys(const QueryTile& tile, const Piece& piece, const Piece* next, R* dk, R* dv) {
    const int64_t padded = scratch_width<R>(p->H), v_padded = scratch_width<R>(p->Hv);
    read_keys(tile, piece);
    const TileMask<PANEL>& m = masker.mask;
    if (garbage) hide_garbage(tile, g->dout);
    const int panels = (tile.lanes() + PANEL - 1) / PANEL;
    Ahead ahead;
    if (next) ahead = cache.ahead(tile.b, tile.n / (p->N / p->K), *next, panels * p->H / kMicroRows);
    for (int panel = 0; panel < panels; ++panel) {
      const int first = m.first[panel], count = m.last[panel] - first;
      if (m.kind != kIsFull) clear_outside(panel);
      if (count <= 0) continue;
      scores(panel);
      if (p->by_distance.slopes)
        slopes.add_gradient(far, ds + first * kLanes + panel * PANEL, kLanes, NV, panel * PANEL, masker.kv.pos + first,
                            count);
      if (p->soft_cap != 0) apply_slope(panel);
      gemm<R, NV, true, kAdd>(p->H, count, k + first * width, width, ds + first * kLanes + panel * PANEL, kLanes,
                              dq + panel * p->H * PANEL, PANEL, nullptr, ahead);
    }
    for (int i = m.lo; i < m.hi;) {
      // Keys in steps of the micro-kernel; queries only of the panels that see one of these keys.
      int a = panels, b = 0;
      const int step = lesser(m.hi - i, kMicroRows);
      for (int panel = 0; panel < panels; ++panel)
        if (m.first[panel] < i + step && m.last[panel] > i) a = lesser(a, panel), b = panel + 1;
      if (a < b) {
        const int64_t lane = a * PANEL, lanes = (b - a) * PANEL;
        add_rows(step, lanes, w + i * kLanes + lane, do_rows + lane * v_width, v_width, dv + i * v_padded, v_padded);
        add_rows(step, lanes, ds + i * kLanes + lane, q_rows + lane * width, width, dk + i * padded, padded);
      }
      i += step;
    }
  }

  void add_rows(int step, int64_t lanes, const R* a, const R* rows, int64_t width, R* out, int64_t padded) {
    int64_t h = 0;
    for (; h + PANEL <= width; h += PANEL)
      gemm<R, NV, false, kAdd>(step, lanes, a, kLanes, rows + h, width, out + h, padded);
    if (h < width) gemm<R, 1, false, kAdd>(step, lanes, a, kLanes, rows + h, width, out + h, padded);
  }

  void finish(const QueryTile& tile, void* all_dq) {
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      const R* x = dq + lane / PANEL * p->H * PANEL + lane % PANEL;
      for (int64_t h = 0; h < p->H; ++h) q_rows[h] = x[h * PANEL] * R(p->scale);
      write_row(all_dq, p->type, tile.offset(*p, lane) * p->H, q_rows, p->H);
      if (p->by_distance.slopes) static_cast<R*>(g->dslopes)[tile.offset(*p, lane)] = -far[lane];
    }
  }
};

// The split of the queries of each kv head into chunks, and the rows of the scratch for dk and dv of each chunk.
struct Chunks {
  const Problem* p;
  Tiling tiling;
  int64_t count = 1;  // chunks per kv head
  int64_t* tiles;     // [layout rows, q tiles]: the kv slots that each tile visits, (first, one past the last)
  int64_t* hulls;     // [B,K,count]: the kv slots that each chunk visits
  int64_t* bases;     // [B,K,count]: the first row of each chunk in the scratch

  explicit Chunks(const Problem& problem) : p(&problem), tiling(problem), tiles(nullptr), hulls(nullptr) {}
  ~Chunks() {
    free(tiles);
    free(hulls);
  }
  int64_t heads_per_kv() const { return p->N / p->K; }

  // Uses as many chunks as fit into `rows` rows per kv head, so that many threads have work. One chunk always fits.
  bool plan(int64_t rows) {
    const int64_t most = lesser<int64_t>(greater<int64_t>(1, lesser<int64_t>(16, 64 / (p->B * p->K))), tiling.per_head);
    const Layout& l = p->layout;
    const int64_t planes = 1 + (p->B - 1) * l.b_stride + (p->N - 1) * l.n_stride;
    tiles = static_cast<int64_t*>(malloc(sizeof(int64_t) * size_t(2 * planes * l.nq + 1)));
    hulls = static_cast<int64_t*>(malloc(sizeof(int64_t) * size_t(3 * p->B * p->K * most + 1)));
    if (!tiles || !hulls) return false;
    bases = hulls + 2 * p->B * p->K * most;
    for (int64_t b = 0; b < (l.b_stride ? p->B : 1); ++b)
      for (int64_t n = 0; n < (l.n_stride ? p->N : 1); ++n)
        for (int64_t i = 0; i < l.nq; ++i) measure(b, n, i);
    for (count = most; count > 1 && !place(rows);) --count;
    if (count == 1) place(rows);
    return true;
  }

  void measure(int64_t b, int64_t n, int64_t i) {
    QueryTile tile;
    tile.b = b, tile.n = n, tile.layout_tile = i;
    int64_t* hull = tiles + 2 * (Walk::layout_row(*p, b, n) * p->layout.nq + i);
    hull[0] = p->S, hull[1] = 0;
    Walk walk(*p, tile);
    for (int64_t lo, hi, kv_tile, visit, column; walk.next(lo, hi, kv_tile, visit, column);) {
      hull[0] = lesser(hull[0], lo);
      hull[1] = greater(hull[1], hi);
    }
  }

  int64_t first_tile(int64_t chunk) const { return tiling.per_head * chunk / count; }

  bool place(int64_t rows) {
    for (int64_t pair = 0; pair < p->B * p->K; ++pair) {
      int64_t used = 0;
      for (int64_t c = 0; c < count; ++c) {
        int64_t* hull = hulls + 2 * (pair * count + c);
        hull[0] = p->S, hull[1] = 0;
        for (int64_t n = 0; n < (p->layout.n_stride ? heads_per_kv() : 1); ++n) {
          const int64_t* row =
              tiles + 2 * Walk::layout_row(*p, pair / p->K, pair % p->K * heads_per_kv() + n) * p->layout.nq;
          for (int64_t j = first_tile(c); j < first_tile(c + 1); ++j) {
            const int64_t* t = row + 2 * (j / tiling.tiles_per_layout_tile);
            hull[0] = lesser(hull[0], t[0]);
            hull[1] = greater(hull[1], t[1]);
          }
        }
        hull[0] = lesser(hull[0], hull[1]);
        bases[pair * count + c] = used;
        used += hull[1] - hull[0];
      }
      if (used > rows) return false;
    }
    return true;
  }
};

template <class R>
struct BackwardJob {
  const Problem* p;
  const Backward* g;
  Chunks chunks;
  int64_t padded, v_padded;

  BackwardJob(const Problem& problem, const Backward& backward) : p(&problem), g(&backward), chunks(problem) {
    padded = scratch_width<R>(p->H);
    v_padded = scratch_width<R>(p->Hv);
  }
  static void task(void* self, int64_t i, void* scratch) { static_cast<BackwardJob*>(self)->compute(i, scratch); }
  static void reduce_task(void* self, int64_t i, void*) { static_cast<BackwardJob*>(self)->reduce(i); }

  // Later chunks first: under a causal mask they are the longest.
  int64_t ordered(int64_t i) const {
    const int64_t pairs = p->B * p->K;
    return i % pairs * chunks.count + (chunks.count - 1 - i / pairs);
  }

  int64_t scratch_row(int64_t i) const { return i / chunks.count * g->rows + chunks.bases[i]; }

  void compute(int64_t order, void* scratch) {
    const int64_t i = ordered(order), chunk = i % chunks.count, pair = i / chunks.count;
    BackwardTile<R> work;
    Arena arena = {static_cast<char*>(scratch)};
    work.take(arena, *p);
    work.cache.clear();
    work.g = g;
    const int64_t base = chunks.hulls[2 * i], rows = chunks.hulls[2 * i + 1] - base;
    R* dk = static_cast<R*>(g->scratch_dk) + scratch_row(i) * padded;
    R* dv = static_cast<R*>(g->scratch_dv) + scratch_row(i) * v_padded;
    __builtin_memset(dk, 0, sizeof(R) * size_t(rows * padded));
    __builtin_memset(dv, 0, sizeof(R) * size_t(rows * v_padded));
    const Tiling& tiling = chunks.tiling;
    const int64_t groups = chunks.heads_per_kv() / tiling.heads;
    for (int64_t j = chunks.first_tile(chunk); j < chunks.first_tile(chunk + 1); ++j)
      for (int64_t group = 0; group < groups; ++group) {
        QueryTile tile;
        if (!tiling.at(*p, pair / p->K, pair % p->K * groups + group, j, tile)) continue;
        work.begin(tile, *g);
        Pieces pieces(*p, tile, work.keys, 0, p->S);
        Piece now, next;
        for (bool some = pieces.next(now); some; now = next) {
          some = pieces.next(next);
          if (!work.masker.read(now)) continue;
          const int64_t at = now.first - base;
          work.visit_keys(tile, now, some ? &next : nullptr, dk + at * padded, dv + at * v_padded);
        }
        work.finish(tile, g->dq);
      }
  }

  static constexpr int64_t kReduceRows = 256;

  void reduce(int64_t i) {
    const int64_t blocks = (p->S + kReduceRows - 1) / kReduceRows;
    const int64_t pair = i / blocks, s0 = i % blocks * kReduceRows, head = pair % p->K, b = pair / p->K;
    for (int64_t s = s0; s < lesser(p->S, s0 + kReduceRows); ++s) {
      const int64_t at = (b * p->S + s) * p->K + head;
      reduce_row(pair, s, static_cast<const R*>(g->scratch_dk), padded, g->dk, at, p->H);
      reduce_row(pair, s, static_cast<const R*>(g->scratch_dv), v_padded, g->dv, at, p->Hv);
    }
  }

  void reduce_row(int64_t pair, int64_t s, const R* from, int64_t stride, void* to, int64_t at, int64_t size) {
    alignas(64) R row[kMaxHead];
    for (int64_t h = 0; h < size; ++h) row[h] = 0;
    for (int64_t c = pair * chunks.count; c < (pair + 1) * chunks.count; ++c) {
      const int64_t* hull = chunks.hulls + 2 * c;
      if (s < hull[0] || s >= hull[1]) continue;
      const R* x = from + (scratch_row(c) + s - hull[0]) * stride;
      for (int64_t h = 0; h < size; ++h) row[h] += x[h];
    }
    write_row(to, p->type, at * size, row, size);
  }

  bool run(Runner& runner) {
    if (!chunks.plan(g->rows)) return false;
    Arena arena = {nullptr};
    BackwardTile<R> measure;
    measure.take(arena, *p);
    return runner.run(p->B * p->K * chunks.count, task, this, arena.used) &&
           runner.run(p->B * p->K * ((p->S + kReduceRows - 1) / kReduceRows), reduce_task, this, 0);
  }
};

}  // namespace
}  // namespace longspan::LONGSPAN_ISA
