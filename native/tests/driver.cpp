// Random calls of the kernels without XLA, compared with a naive double loop: with every instruction set of this
// machine, several numbers of threads (which must give the same bits), and NaN in all masked inputs. Build it with
// sanitizers: cmake -DLONGSPAN_SANITIZE=address,undefined (or thread).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "case.h"
#include "comparisons.h"
#include "masks.h"
#include "runner.h"

namespace {

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

struct Answer {
  std::vector<double> out, lse, dq, dk, dv, dbias, dtable, dslopes, delta;
  double far = 0;  // the sum of the absolute values of the terms in dslopes
};

struct Outputs {
  Array out, lse, dq, dk, dv, dbias;
};

// All results from their formulas, in double.
Answer naive(const Case& c, const Array& dout, const Array& dlse) {
  const Call& call = c.call;
  const int64_t B = c.B, T = c.T, S = c.S, N = c.N, K = c.K, H = c.H, V = c.Hv, G = N / K;
  Answer a;
  a.out.assign(size_t(B * T * N * V), 0), a.dq.assign(size_t(B * T * N * H), 0);
  a.lse.assign(size_t(B * T * N), 0), a.delta = a.lse;
  a.dk.assign(size_t(B * S * K * H), 0), a.dv.assign(size_t(B * S * K * V), 0);
  const bool biased = call.roles[kBias] >= 0, sunk = call.roles[kSinks] >= 0, drops = call.roles[kSeed] >= 0;
  const Array bias = biased ? call.rest[size_t(call.roles[kBias])] : Array();
  if (biased) a.dbias.assign(size_t(count_of(bias)), 0);
  if (c.given(kTable)) a.dtable.assign(size_t(count_of(*c.given(kTable))), 0);
  a.dslopes = a.lse;
  const std::vector<double> keys(size_t(S), 0.0);
  std::vector<double> score = keys, slope = keys, p = keys, keep = keys;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t n = 0; n < N; ++n)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = (b * T + t) * N + n, q0 = row * H, o0 = row * V;
        const double sink = sunk ? get(call.rest[size_t(call.roles[kSinks])], n) : -INFINITY;
        double top = sink, total = 0;
        for (int64_t s = 0; s < S; ++s) {
          const double w = c.weight[size_t(((b * N + n) * T + t) * S + s)];
          score[size_t(s)] = -INFINITY;
          keep[size_t(s)] = 1;
          if (w == 0) continue;
          double x = 0;
          for (int64_t h = 0; h < H; ++h) x += get(call.q, q0 + h) * get(call.k, ((b * S + s) * K + n / G) * H + h);
          x *= call.scale;
          slope[size_t(s)] = 1;
          if (call.soft_cap != 0) {
            const double u = std::tanh(x / call.soft_cap);
            x = call.soft_cap * u;
            slope[size_t(s)] = 1 - u * u;
          }
          x += c.bias(b, n, t, s);
          score[size_t(s)] = x + std::log(w);
          top = std::max(top, score[size_t(s)]);
          if (drops) {
            const uint32_t* seed = static_cast<const uint32_t*>(call.rest[size_t(call.roles[kSeed])].data);
            const uint32_t u = mix(mix(mix(seed[0] + uint32_t(b)) ^ uint32_t(n)) + uint32_t(c.qp(b, t)));
            const uint32_t z = mix(mix(mix(seed[1] + uint32_t(b)) ^ uint32_t(n)) + uint32_t(c.qp(b, t)));
            keep[size_t(s)] =
                mix(mix(uint32_t(c.kp(b, s)) ^ u) + z) >= call.dropout_threshold ? 1 / (1 - call.dropout_rate) : 0;
          }
        }
        if (top == -INFINITY) {
          a.lse[size_t(row)] = -INFINITY;
          continue;
        }
        total = std::exp(sink - top);
        for (int64_t s = 0; s < S; ++s) total += p[size_t(s)] = std::exp(score[size_t(s)] - top);
        a.lse[size_t(row)] = top + std::log(total);
        double delta = -get(dlse, row);
        for (int64_t s = 0; s < S; ++s) {
          p[size_t(s)] /= total;
          if (p[size_t(s)] > 0)
            for (int64_t h = 0; h < V; ++h)
              a.out[size_t(o0 + h)] += p[size_t(s)] * keep[size_t(s)] * get(call.v, ((b * S + s) * K + n / G) * V + h);
        }
        for (int64_t h = 0; h < V; ++h)
          delta += a.out[size_t(o0 + h)] == 0 ? 0 : a.out[size_t(o0 + h)] * get(dout, o0 + h);
        a.delta[size_t(row)] = delta;
        double far = 0;
        for (int64_t s = 0; s < S; ++s) {
          if (!(p[size_t(s)] > 0)) continue;
          double dp = 0;
          const int64_t key = (b * S + s) * K + n / G, k0 = key * H, v0 = key * V;
          for (int64_t h = 0; h < V; ++h) {
            dp += get(dout, o0 + h) * get(call.v, v0 + h);
            a.dv[size_t(v0 + h)] += p[size_t(s)] * keep[size_t(s)] * get(dout, o0 + h);
          }
          double ds = p[size_t(s)] * (dp * keep[size_t(s)] - delta);
          if (biased) a.dbias[size_t(broadcast_at(bias, b, n, t, s))] += ds;
          if (c.given(kTable)) a.dtable[size_t(c.table_at(b, n, t, s))] += ds;
          a.dslopes[size_t(row)] -= ds * double(c.distance(b, t, s));
          far += std::fabs(ds) * double(c.distance(b, t, s));
          ds *= slope[size_t(s)] * call.scale;
          for (int64_t h = 0; h < H; ++h) {
            a.dq[size_t(q0 + h)] += ds * get(call.k, k0 + h);
            a.dk[size_t(k0 + h)] += ds * get(call.q, q0 + h);
          }
        }
        a.far = std::max(a.far, far);
      }
  return a;
}

int failures = 0;

void compare(const char* name, const Array& got, const std::vector<double>& want, double eps, int seed, const char* isa,
             double least = 1e-3) {
  double size = least, worst = 0;
  int64_t at = -1;
  for (double x : want)
    if (std::isfinite(x)) size = std::max(size, std::fabs(x));
  for (int64_t i = 0; i < int64_t(want.size()); ++i) {
    const double x = get(got, i), y = want[size_t(i)];
    const double error = std::isinf(y) ? (x == y ? 0 : INFINITY) : std::fabs(x - y) / size;
    if (!(error <= worst)) worst = error, at = i;
  }
  if (worst <= eps) return;
  ++failures;
  std::printf("case %d %s: %s[%ld] = %g, want %g (error %g, allowed %g)\n", seed, isa, name, long(at), get(got, at),
              want[size_t(at)], worst, eps);
}

void run_case(int seed) {
  rng.seed(unsigned(seed));
  Case c;
  c.make_inputs();
  c.make_layout();
  c.rule = c.tree(3, true);
  c.make_garbage();
  const Array dout = c.store.array(c.type, {c.B, c.T, c.N, c.Hv});
  const Type stats = c.type == F64 ? F64 : F32;
  const Array dlse = c.store.array(stats, {c.B, c.T, c.N});
  for (int64_t i = 0; i < count_of(dout); ++i) set(dout, i, normal());
  for (int64_t i = 0; i < count_of(dlse); ++i) set(dlse, i, normal());
  const Answer want = naive(c, dout, dlse);
  const Array lse = c.store.array(stats, {c.B, c.T, c.N}), lse_low = c.store.array(stats, {c.B, c.T, c.N});
  const Array delta = c.store.array(stats, {c.B, c.T, c.N});
  for (int64_t i = 0; i < count_of(lse); ++i) {
    const double x = want.lse[size_t(i)];
    set(lse, i, x), set(lse_low, i, std::isinf(x) ? 0 : x - get(lse, i)), set(delta, i, want.delta[size_t(i)]);
  }
  const Given given = {lse, lse_low, dout, delta};
  Built built;
  const std::string error = build(chance(0.25) ? c.stacked() : c.call, built);
  if (!error.empty()) {
    ++failures;
    std::printf("case %d: %s\n", seed, error.c_str());
    return;
  }
  const double eps = c.type == F64 ? 1e-12 : c.type == F32 ? 3e-5 : c.type == F16 ? 3e-3 : 2e-2;
  const int64_t unit = 64 / (stats == F64 ? 8 : 4), rows = c.S + pick(0, 3) * c.S / 2;
  const int64_t padded = (c.H + unit - 1) / unit * unit, v_padded = (c.Hv + unit - 1) / unit * unit;
  for (const Kernel* kernel : kernels_here()) {
    std::vector<std::string> bits;
    for (int threads : {1, 3}) {
      const Array out = c.store.array(c.type, {c.B, c.T, c.N, c.Hv}), l = c.store.array(stats, {c.B, c.T, c.N}),
                  low = c.store.array(stats, {c.B, c.T, c.N});
      const Array dq = c.store.array(c.type, {c.B, c.T, c.N, c.H});
      const Array dk = c.store.array(c.type, {c.B, c.S, c.K, c.H}), dv = c.store.array(c.type, {c.B, c.S, c.K, c.Hv});
      const Array sk = c.store.array(stats, {c.B, c.K, rows, padded}),
                  sv = c.store.array(stats, {c.B, c.K, rows, v_padded});
      std::vector<std::pair<const char*, Array>> results = {
          {"out", out}, {"lse", l}, {"dq", dq}, {"dk", dk}, {"dv", dv}};
      // This scratch is not aligned to vectors, but XLA's buffers are, so the kernels get an aligned address.
      std::unique_ptr<void, void (*)(void*)> ak(std::aligned_alloc(64, size_t(count_of(sk)) * 8 + 64), std::free);
      std::unique_ptr<void, void (*)(void*)> av(std::aligned_alloc(64, size_t(count_of(sv)) * 8 + 64), std::free);
      ThreadRunner runner(threads);
      kernel->forward(built.problem,
                      {const_cast<void*>(out.data), const_cast<void*>(l.data), const_cast<void*>(low.data), out.type},
                      runner);
      Backward g;
      std::string bad = check_backward(built.problem, given, dq, dk, dv, sk, sv, g);
      g.dq = const_cast<void*>(dq.data), g.dk = const_cast<void*>(dk.data), g.dv = const_cast<void*>(dv.data);
      g.scratch_dk = ak.get(), g.scratch_dv = av.get();
      const Array ds = c.store.array(stats, {c.B, c.T, c.N});
      g.dslopes = const_cast<void*>(ds.data);
      if (!bad.empty() || !kernel->backward(built.problem, g, runner)) {
        ++failures;
        std::printf("case %d: backward: %s\n", seed, bad.c_str());
        return;
      }
      std::vector<const std::vector<double>*> wants = {&want.out, &want.lse, &want.dq, &want.dk, &want.dv};
      for (const Role role : {kBias, kTable}) {
        if (!c.given(role)) continue;
        const Array& b = *c.given(role);
        const bool of_table = c.call.of_table = role == kTable;
        const int64_t dims[4] = {of_table ? 1 : b.dims[0], b.dims[1 - of_table], of_table ? 1 : b.dims[2],
                                 b.dims[of_table ? 1 : 3]};
        const Array db = c.store.array(stats, {dims[0], dims[1], dims[2], dims[3]});
        const Array sc = c.store.array(stats, {3, dims[0], dims[1], dims[2], dims[3]});
        BiasGradient bg;
        bad = check_bias_gradient(built.problem, c.call, given, db, sc, bg);
        bg.dbias = const_cast<void*>(db.data), bg.scratch = const_cast<void*>(sc.data);
        if (!bad.empty()) ++failures, std::printf("case %d: %s\n", seed, bad.c_str());
        kernel->bias_gradient(built.problem, bg, runner);
        results.push_back({of_table ? "dtable" : "dbias", db});
        wants.push_back(of_table ? &want.dtable : &want.dbias);
      }
      if (c.given(kSlopes)) results.push_back({"dslopes", ds}), wants.push_back(&want.dslopes);
      std::string all;
      for (auto& r : results)
        all.append(static_cast<const char*>(r.second.data), size_t(count_of(r.second) * size_of(r.second.type)));
      bits.push_back(all);
      if (threads > 1) continue;
      for (size_t i = 0; i < results.size(); ++i) {
        const bool is_lse = i == 1 && stats == F32, is_dbias = i >= 5 && stats == F32;
        const double allowed = is_lse ? 1e-5 : is_dbias ? std::max(eps, 1e-4) : eps;
        const bool sums = wants[i] == &want.dslopes;
        compare(results[i].first, results[i].second, *wants[i], allowed, seed, kernel->name,
                sums ? std::max(want.far, 1e-3) : 1e-3);
      }
    }
    if (bits[0] != bits[1]) ++failures, std::printf("case %d %s: other bits with other threads\n", seed, kernel->name);
  }
}

// Products of a few rows with random shapes: equal to a naive loop, with the same bits on any number of threads.
void run_product(int seed) {
  std::mt19937 random{uint32_t(seed)};
  auto upto = [&](int most) { return int64_t(1 + random() % uint32_t(most)); };
  const int64_t rows = upto(kMaxRows), inner = upto(70), count = upto(3);
  const bool by_outer = random() % 2, halves = random() % 2;
  auto number = [&] { return float(int(random() % 2001) - 1000) / 1000; };
  std::vector<float> x(size_t(rows * inner));
  for (float& v : x) v = number();
  std::vector<std::vector<float>> weights;
  std::vector<std::vector<uint16_t>> stored;
  std::vector<Matrix> matrices;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t outer = upto(i ? 700 : 3000);
    weights.emplace_back(size_t(inner * outer));
    stored.emplace_back(size_t(inner * outer));
    for (size_t j = 0; j < weights.back().size(); ++j) {
      uint32_t bits;
      float v = number();
      std::memcpy(&bits, &v, 4);
      if (halves) bits &= 0xFFFF0000u;
      std::memcpy(&v, &bits, 4);
      weights.back()[j] = v, stored.back()[j] = uint16_t(bits >> 16);
    }
    matrices.push_back({nullptr, halves ? BF16 : F32, outer, nullptr});
  }
  for (const Kernel* kernel : kernels_here()) {
    std::vector<std::vector<float>> results[2];
    for (const int threads : {1, 3}) {
      auto& y = results[threads > 1];
      for (int64_t i = 0; i < count; ++i) y.emplace_back(size_t(rows * matrices[size_t(i)].outer));
      for (int64_t i = 0; i < count; ++i) {
        Matrix& m = matrices[size_t(i)];
        m.data = halves ? static_cast<const void*>(stored[size_t(i)].data()) : weights[size_t(i)].data();
        m.y = y[size_t(i)].data();
      }
      ThreadRunner runner(threads);
      kernel->product({x.data(), rows, inner, count, by_outer, matrices.data()}, runner);
    }
    bool same = results[0] == results[1], close = true;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t outer = matrices[size_t(i)].outer;
      for (int64_t b = 0; b < rows; ++b)
        for (int64_t o = 0; o < outer; ++o) {
          double want = 0;
          for (int64_t k = 0; k < inner; ++k)
            want +=
                double(x[size_t(b * inner + k)]) * weights[size_t(i)][size_t(by_outer ? o * inner + k : k * outer + o)];
          close &= std::abs(results[0][size_t(i)][size_t(b * outer + o)] - want) < 1e-5 * double(inner);
        }
    }
    if (!same || !close) ++failures, std::printf("product %d %s: same %d close %d\n", seed, kernel->name, same, close);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, count = argc > 2 ? std::atoi(argv[2]) : 200;
  for (int i = first; i < first + count; ++i) {
    const int before = failures;
    run_case(i);
    run_product(i);
    failures += run_comparisons(i, 40);
    if (failures > before && failures > 20) break;
  }
  std::string names;
  for (const Kernel* kernel : kernels_here()) names += std::string(" ") + kernel->name;
  std::printf("%d passed, %d failed on%s\n", count - failures, failures, names.c_str());
  return failures != 0;
}
