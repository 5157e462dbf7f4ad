// Forward: online softmax over the key tiles that a tile of queries visits. Queries lie along the lanes, so the running
// maximum and sum are vectors and no reduction across lanes exists.

template <class R, int NV>
struct ForwardTile {
  static constexpr int L = Simd<R>::lanes, PANEL = NV * L;
  const Problem* p;
  Masker<R, PANEL> masker;
  KeyCache<R> cache;
  R *rows, *q, *out, *s;  // rows [kLanes][width]; q, out [panel][H][PANEL]; s [kKeys][PANEL]
  R *top, *sum;           // running maximum and sum of a lane
  int64_t width, keys;
  DropoutLanes drop;

  void take(Arena& arena, const Problem& problem) {
    p = &problem;
    width = (problem.H + L - 1) / L * L;
    keys = keys_per_tile(problem);
    masker.take(arena, problem);
    cache.take(arena, problem, width, keys, Tiling(problem).per_head > 1);
    rows = arena.take<R>(kLanes * width);
    q = arena.take<R>(kLanes * problem.H);
    out = arena.take<R>(kLanes * problem.H);
    s = arena.take<R>(keys * PANEL);
    top = arena.take<R>(kLanes);
    sum = arena.take<R>(kLanes);
  }

  // Keys [from, to) of what the tile visits; the sink joins the softmax if `with_sink`.
  void run(const QueryTile& tile, int64_t from, int64_t to, bool with_sink) {
    begin(tile, with_sink);
    Walk walk(*p, tile);
    for (int64_t lo, hi, kv_tile, visit, column; walk.next(lo, hi, kv_tile, visit, column);) {
      hi = lesser(hi, to);
      lo = greater(lo, from);
      for (int count; lo < hi; lo += count) {
        count = int(lesser(keys - lo % keys, hi - lo));
        if (masker.read(lo, count, kv_tile, visit)) visit_keys(tile, lo, lesser(hi, lo + count + keys));
      }
    }
  }

  void begin(const QueryTile& tile, bool with_sink) {
    masker.begin(tile);
    read_queries(rows, width, *p, p->q, tile, R(p->scale));
    to_panels<R, PANEL>(q, rows, width, p->H, tile.lanes());
    const int panels = (tile.lanes() + PANEL - 1) / PANEL;
    __builtin_memset(out, 0, sizeof(R) * size_t(panels * PANEL * p->H));
    for (int i = 0; i < kLanes; ++i) {
      const bool sink = with_sink && p->sinks && i < tile.lanes();
      top[i] = sink ? static_cast<const R*>(p->sinks)[tile.head(i)] : -kInf<R>;
      sum[i] = top[i] == -kInf<R> ? 0 : 1;
    }
    if (p->dropout.on) drop.begin(*p, tile, masker.q);
  }

  // Keys from s0 on; the tile after them ends at `next_end`.
  void visit_keys(const QueryTile& tile, int64_t s0, int64_t next_end) {
    const TileMask<PANEL>& m = masker.mask;
    const int64_t head = tile.n / (p->N / p->K);
    const R *k, *v;
    cache.get(k, v, tile.b, head, s0, masker.kv.count, m.kind == kIsPartial, m.seen);
    const int64_t next = s0 + masker.kv.count;
    const bool ahead = next < next_end && !cache.has(next, int(next_end - next));
    const int panels = (tile.lanes() + PANEL - 1) / PANEL;
    for (int panel = 0; panel < panels; ++panel) {
      if (ahead) prefetch_keys(*p, tile.b, head, next, next_end, panel, panels);
      attend(panel, k, width, v);
    }
  }

  // One panel's queries and the keys of the tile that it sees.
  void attend(int panel, const R* k, int64_t k_width, const R* v) {
    const TileMask<PANEL>& m = masker.mask;
    const int first = m.first[panel], count = m.last[panel] - first;
    if (count <= 0) return;
    alignas(64) R alpha[PANEL];
    gemm<R, NV, false, kStore>(count, p->H, k + first * k_width, k_width, q + panel * p->H * PANEL, PANEL, s, PANEL);
    if (p->soft_cap != 0) soften(count);
    if (p->has_bias) add_bias(panel, first, count);
    if (m.exact[panel])
      softmax<false>(panel, first, count, alpha);
    else
      softmax<true>(panel, first, count, alpha);
    if (p->dropout.on) drop_some(panel, first, count);
    gemm<R, NV, true, kScaleAdd>(p->H, count, v + first * width, width, s, PANEL, out + panel * p->H * PANEL, PANEL, alpha);
  }

  void soften(int count) {
    const R cap = R(p->soft_cap), inverse = R(1 / p->soft_cap);
    for (int i = 0; i < count * PANEL; i += L) store(s + i, cap * vtanh(load(s + i) * inverse));
  }

  void add_bias(int panel, int first, int count) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const Vec<R> b = load(masker.bias + (first + i) * kLanes + panel * PANEL + j);
        store(s + i * PANEL + j, load(s + i * PANEL + j) + b);
      }
  }

  // Scores in `s` become exp(score - maximum); alpha is what older sums must be multiplied with.
  template <bool MASKED>
  __attribute__((noinline)) void softmax(int panel, int first, int count, R* alpha) {
    for (int j = 0; j < NV; ++j) {
      const int lane = panel * PANEL + j * L;
      const Vec<R> old = load(top + lane);
      Vec<R> high = old;
      R* column = s + j * L;
      for (int i = 0; i < count; ++i) {
        Vec<R> x = load(column + i * PANEL);
        if (MASKED) {
          x = lanes_of<R>(masker.mask.bytes[first + i] + lane) ? x : splat(-kInf<R>);
          store(column + i * PANEL, x);
        }
        high = x > high ? x : high;
      }
      // A lane that has seen no key yet: (-inf) - (-inf) would be NaN.
      const Vec<R> base = high == -kInf<R> ? splat(R(0)) : high;
      const Vec<R> factor = vexp(old - base);
      Vec<R> total = {};
      for (int i = 0; i < count; ++i) {
        const Vec<R> e = vexp(load(column + i * PANEL) - base);
        total += e;
        store(column + i * PANEL, e);
      }
      store(alpha + j * L, factor);
      store(sum + lane, load(sum + lane) * factor + total);
      store(top + lane, high);
    }
  }

  void drop_some(int panel, int first, int count) {
    const R factor = R(p->dropout.inverse_keep);
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < PANEL; j += L) {
        const auto keep = drop.template keep<R>(panel * PANEL + j, masker.kv.pos[first + i]);
        store(s + i * PANEL + j, keep ? load(s + i * PANEL + j) * factor : splat(R(0)));
      }
  }

  // Writes out / sum, and lse = maximum + log(sum).
  void finish(const QueryTile& tile, const Forward& f) {
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      const R* x = out + lane / PANEL * p->H * PANEL + lane % PANEL;
      const R total = sum[lane], inverse = total == 0 ? R(0) : R(1) / total;
      for (int64_t h = 0; h < p->H; ++h) rows[h] = total == 0 ? R(0) : x[h * PANEL] * inverse;
      const int64_t at = tile.offset(*p, lane);
      write_row(f.out, f.out_type, at * p->H, rows, p->H);
      static_cast<R*>(f.lse)[at] = total == 0 ? -kInf<R> : top[lane] + R(__builtin_log(double(total)));
    }
  }
};

// Large enough to amortise the update of the output, small enough that k, v and a panel stay close.
static inline int64_t keys_per_tile(const Problem& p) { return p.H <= 128 ? kKeys : kKeys / 2; }

// Decoding: few queries, all keys, bound by memory. All kv heads of a run of rows are read together, in the order in
// which they lie in memory; head by head every row would be another page and the time would go into page walks.
template <class R, int NV>
struct Stream {
  ForwardTile<R, NV> work;
  const Problem* p;
  const Tiling* tiling;
  int64_t rows;          // of a run
  R *q, *out, *top, *sum;  // of every group of heads
  R *k, *v;              // [K][rows][width]

  void take(Arena& arena, const Problem& problem, const Tiling& t) {
    constexpr int PANEL = ForwardTile<R, NV>::PANEL;
    p = &problem;
    tiling = &t;
    work.take(arena, problem);
    const int64_t row = problem.K * work.width * int64_t(sizeof(R)) * 2;
    rows = greater<int64_t>(1, lesser<int64_t>(work.keys, (160 << 10) / row) / kMicroRows) * kMicroRows;
    q = arena.take<R>(t.groups * problem.H * PANEL);
    out = arena.take<R>(t.groups * problem.H * PANEL);
    top = arena.take<R>(t.groups * kLanes);
    sum = arena.take<R>(t.groups * kLanes);
    k = arena.take<R>(problem.K * rows * work.width);
    v = arena.take<R>(problem.K * rows * work.width);
  }

  void select(int64_t group) {
    constexpr int PANEL = ForwardTile<R, NV>::PANEL;
    work.q = q + group * p->H * PANEL;
    work.out = out + group * p->H * PANEL;
    work.top = top + group * kLanes;
    work.sum = sum + group * kLanes;
  }

  void run(int64_t b, int64_t from, int64_t to, bool with_sink) {
    QueryTile tile;
    for (int64_t g = 0; g < tiling->groups; ++g) {
      tiling->at(*p, b, g, 0, tile);
      select(g);
      work.begin(tile, with_sink);
    }
    tiling->at(*p, b, 0, 0, tile);
    Walk walk(*p, tile);
    for (int64_t lo, hi, kv_tile, visit, column; walk.next(lo, hi, kv_tile, visit, column);) {
      hi = lesser(hi, to);
      lo = greater(lo, from);
      for (int count; lo < hi; lo += count) {
        count = int(lesser(rows - lo % rows, hi - lo));
        visit_keys(b, lo, count, hi, kv_tile, visit);
      }
    }
  }

  void visit_keys(int64_t b, int64_t s0, int count, int64_t end, int64_t kv_tile, int64_t visit) {
    QueryTile tile;
    tiling->at(*p, b, 0, 0, tile);
    work.masker.begin(tile);
    if (!p->has_bias && !work.masker.read(s0, count, kv_tile, visit)) return;
    // Keys are used once, in order, so they may stay where they are; unless some row must be hidden or converted.
    const bool in_place = !p->has_bias && work.masker.mask.kind == kIsFull && p->type == (sizeof(R) == 4 ? F32 : F64);
    const bool finite = read_all(b, s0, count, in_place);
    for (int64_t g = 0; g < tiling->groups; ++g) {
      ask(b, s0 + count, lesser(end, s0 + count + rows), g);
      tiling->at(*p, b, g, 0, tile);
      select(g);
      if (p->dropout.on) work.drop.begin(*p, tile, work.masker.q);
      if (p->has_bias) {
        work.masker.begin(tile);
        if (!work.masker.read(s0, count, kv_tile, visit)) continue;
      }
      const int64_t head = g * p->K / tiling->groups;
      const R *keys = k + head * rows * work.width, *values = v + head * rows * work.width;
      if (!finite && work.masker.mask.kind == kIsPartial) {
        work.cache.clear();
        work.cache.get(keys, values, b, head, s0, count, true, work.masker.mask.seen);
      }
      if (in_place)
        work.attend(0, static_cast<const R*>(p->k) + ((b * p->S + s0) * p->K + head) * p->H, p->K * p->H, values);
      else
        work.attend(0, keys, work.width, values);
    }
  }

  bool read_all(int64_t b, int64_t s0, int count, bool in_place) {
    bool finite = true;
    for (int s = 0; s < count; ++s) {
      for (int64_t head = 0; head < p->K && !in_place; ++head)
        finite &= copy_keys(k + (head * rows + s) * work.width, work.width, *p, p->k, b, head, s0 + s, 1, nullptr);
      for (int64_t head = 0; head < p->K; ++head)
        finite &= copy_keys(v + (head * rows + s) * work.width, work.width, *p, p->v, b, head, s0 + s, 1, nullptr);
    }
    return finite;
  }

  // Asks for the share of group `g` of the rows [s0, end), so that memory works while the products are computed.
  void ask(int64_t b, int64_t s0, int64_t end, int64_t g) {
    const int64_t size = p->type == F64 ? 8 : p->type == F32 ? 4 : 2, bytes = p->K * p->H * size;
    const int64_t lines = greater<int64_t>(0, end - s0) * bytes / 64;
    const int64_t at = (b * p->S + s0) * bytes;
    for (int64_t i = lines * g / tiling->groups; i < lines * (g + 1) / tiling->groups; ++i) {
      __builtin_prefetch(static_cast<const char*>(p->k) + at + i * 64, 0, 2);
      __builtin_prefetch(static_cast<const char*>(p->v) + at + i * 64, 0, 2);
    }
  }
};

template <class R, int NV>
struct ForwardJob {
  const Problem* p;
  const Forward* f;
  Tiling tiling;
  int64_t splits, run_length;  // pieces of S; tiles along T that one task takes
  bool streams;                // decoding: see Stream
  R* partial;                  // splits > 1: [tile][split][H + 2][lanes]
  int64_t lanes;               // of a partial result

  ForwardJob(const Problem& problem, const Forward& forward) : p(&problem), f(&forward), tiling(problem) {
    const int64_t tiles = p->B * tiling.groups * tiling.per_head;
    streams = tiling.per_head == 1 && !p->by_head && !p->has_bits && tiling.heads * tiling.rows_per_tile <= ForwardTile<R, NV>::PANEL;
    splits = tiles < 16 ? greater<int64_t>(1, lesser<int64_t>(16, p->S / 1024)) : 1;
    if (streams) splits = greater<int64_t>(1, lesser<int64_t>(p->S / 1024, 32 / p->B));
    run_length = greater<int64_t>(1, lesser<int64_t>(8, tiles / 128));
    partial = nullptr;
    lanes = tiling.heads * tiling.rows_per_tile;
  }
  int64_t runs() const { return (tiling.per_head + run_length - 1) / run_length; }
  int64_t tasks() const { return p->B * splits * (streams ? 1 : tiling.groups * runs()); }
  R* part(int64_t tile, int64_t split) const { return partial + (tile * splits + split) * (p->H + 2) * lanes; }

  static void task(void* self, int64_t i, void* scratch) { static_cast<ForwardJob*>(self)->compute(i, scratch); }
  static void merge_task(void* self, int64_t i, void* scratch) { static_cast<ForwardJob*>(self)->merge(i, scratch); }

  void compute(int64_t i, void* scratch) {
    Arena arena = {static_cast<char*>(scratch)};
    if (streams) return compute_stream(i, arena);
    ForwardTile<R, NV> work;
    work.take(arena, *p);
    work.cache.clear();
    const int64_t split = i % splits, run = i / splits % runs(), g = i / splits / runs() % tiling.groups;
    const int64_t b = i / splits / runs() / tiling.groups;
    for (int64_t j = run * run_length; j < lesser(tiling.per_head, (run + 1) * run_length); ++j) {
      QueryTile tile;
      if (!tiling.at(*p, b, g, j, tile)) continue;
      work.run(tile, p->S * split / splits, p->S * (split + 1) / splits, split == 0);
      if (splits == 1)
        work.finish(tile, *f);
      else
        save(work, tile, part((b * tiling.groups + g) * tiling.per_head + j, split));
    }
  }

  void compute_stream(int64_t i, Arena& arena) {
    Stream<R, NV> stream;
    stream.take(arena, *p, tiling);
    const int64_t split = i % splits, b = i / splits;
    stream.run(b, p->S * split / splits, p->S * (split + 1) / splits, split == 0);
    for (int64_t g = 0; g < tiling.groups; ++g) {
      QueryTile tile;
      tiling.at(*p, b, g, 0, tile);
      stream.select(g);
      if (splits == 1)
        stream.work.finish(tile, *f);
      else
        save(stream.work, tile, part(b * tiling.groups + g, split));
    }
  }

  void save(const ForwardTile<R, NV>& work, const QueryTile& tile, R* to) {
    constexpr int PANEL = ForwardTile<R, NV>::PANEL;
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      const R* x = work.out + lane / PANEL * p->H * PANEL + lane % PANEL;
      for (int64_t h = 0; h < p->H; ++h) to[h * lanes + lane] = x[h * PANEL];
      to[p->H * lanes + lane] = work.top[lane];
      to[(p->H + 1) * lanes + lane] = work.sum[lane];
    }
  }

  // The pieces of one tile, always added in the same order.
  void merge(int64_t i, void* scratch) {
    R* row = static_cast<R*>(scratch);
    QueryTile tile;
    if (!tiling.at(*p, i / tiling.per_head / tiling.groups, i / tiling.per_head % tiling.groups, i % tiling.per_head, tile)) return;
    for (int lane = 0; lane < tile.lanes(); ++lane) {
      R high = -kInf<R>, total = 0;
      for (int64_t s = 0; s < splits; ++s) {
        const R top = part(i, s)[p->H * lanes + lane];
        high = top > high ? top : high;
      }
      for (int64_t h = 0; h < p->H; ++h) row[h] = 0;
      for (int64_t s = 0; s < splits; ++s) {
        const R* x = part(i, s) + lane;
        if (x[(p->H + 1) * lanes] == 0) continue;
        const R factor = R(__builtin_exp(double(x[p->H * lanes] - high)));
        total += factor * x[(p->H + 1) * lanes];
        for (int64_t h = 0; h < p->H; ++h) row[h] += factor * x[h * lanes];
      }
      if (total != 0)
        for (int64_t h = 0; h < p->H; ++h) row[h] /= total;
      const int64_t at = tile.offset(*p, lane);
      write_row(f->out, f->out_type, at * p->H, row, p->H);
      static_cast<R*>(f->lse)[at] = total == 0 ? -kInf<R> : high + R(__builtin_log(double(total)));
    }
  }

  bool run(Runner& runner) {
    Arena arena = {nullptr};
    Stream<R, NV> measure;
    if (streams)
      measure.take(arena, *p, tiling);
    else
      measure.work.take(arena, *p);
    if (splits > 1) {
      partial = static_cast<R*>(malloc(sizeof(R) * size_t(p->B * tiling.groups * tiling.per_head * splits * (p->H + 2) * lanes)));
      if (!partial) return false;
    }
    runner.run(tasks(), task, this, arena.used);
    if (splits > 1) {
      runner.run(p->B * tiling.groups * tiling.per_head, merge_task, this, sizeof(R) * kMaxHead);
      free(partial);
    }
    return true;
  }
};

template <class R>
static bool forward_of(const Problem& p, const Forward& f, Runner& runner) {
  const Tiling tiling(p);
  if (tiling.heads * tiling.rows_per_tile <= Simd<R>::lanes) {
    ForwardJob<R, 1> job(p, f);
    return job.run(runner);
  }
  ForwardJob<R, 2> job(p, f);
  return job.run(runner);
}
