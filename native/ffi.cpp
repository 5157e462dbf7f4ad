// The XLA custom calls. Every handler checks its arguments and returns an error instead of crashing.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "program.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace longspan {
namespace {

// The calling thread works too, and waits only for tasks that a thread has begun. So a pool that is busy, or that waits
// for this call, cannot deadlock. Helpers that start too late find no task and touch only the shared counters.
class PoolRunner final : public Runner {
 public:
  explicit PoolRunner(ffi::ThreadPool& pool) : pool_(pool) {}

  bool run(int64_t tasks, TaskFn fn, void* ctx, size_t scratch_bytes) override {
    if (tasks <= 0) return true;
    auto shared = std::make_shared<Shared>();
    shared->tasks = tasks;
    const int64_t helpers = std::min<int64_t>(pool_.num_threads(), tasks) - 1;
    for (int64_t i = 0; i < helpers; ++i)
      pool_.Schedule([shared, fn, ctx, scratch_bytes] { work(*shared, fn, ctx, scratch_bytes); });
    work(*shared, fn, ctx, scratch_bytes);
    // At most one task per helper is left. Spinning is usually faster than sleeping and waking up.
    for (int spin = 0; spin < kSpins && shared->done.load() != tasks; ++spin) pause();
    if (shared->done.load() != tasks) {
      std::unique_lock<std::mutex> lock(shared->mutex);
      shared->all_done.wait(lock, [&] { return shared->done.load() == tasks; });
    }
    return !shared->failed.load();
  }

 private:
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t tasks = 0;
    std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};  // whether a task was not run for lack of memory
    std::mutex mutex;
    std::condition_variable all_done;
  };
  static constexpr int kSpins = 4096;  // 50 to 150 microseconds

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  ffi::ThreadPool& pool_;

  // A thread keeps its scratch for the next call. Otherwise the system would allocate and zero its pages in every call.
  struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;
    ~Scratch() { std::free(data); }
    void* at_least(size_t wanted) {
      if (wanted > bytes) {
        std::free(data);
        data = std::aligned_alloc(64, wanted);
        bytes = data ? wanted : 0;
      }
      return data;
    }
  };
  static void* make_scratch(size_t bytes) {
    static thread_local Scratch scratch;
    void* data = scratch.at_least((bytes + kFreshBytes + 63) / 64 * 64);
    return data ? std::memset(data, 0, kFreshBytes) : nullptr;
  }

  static void work(Shared& shared, TaskFn fn, void* ctx, size_t scratch_bytes) {
    void* scratch = nullptr;
    int64_t finished = 0;
    bool failed = false;
    for (int64_t i; (i = shared.next.fetch_add(1)) < shared.tasks; ++finished) {
      if (!scratch && !failed) scratch = make_scratch(scratch_bytes), failed = !scratch;
      if (!failed) fn(ctx, i, scratch);
    }
    if (!finished) return;
    if (failed) shared.failed.store(true);
    if (shared.done.fetch_add(finished) + finished != shared.tasks) return;
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.all_done.notify_all();
  }
};

std::optional<Array> to_array(const ffi::AnyBuffer& buffer, std::string& error) {
  Array a;
  switch (buffer.element_type()) {
    case ffi::F32: a.type = F32; break;
    case ffi::F64: a.type = F64; break;
    case ffi::BF16: a.type = BF16; break;
    case ffi::F16: a.type = F16; break;
    case ffi::S32: a.type = I32; break;
    case ffi::U32: a.type = U32; break;
    case ffi::U8:
    case ffi::PRED: a.type = U8; break;
    default: error = "an operand has a type that the kernel does not know"; return std::nullopt;
  }
  const auto dims = buffer.dimensions();
  if (dims.size() > 6) return error = "an operand has more than six axes", std::nullopt;
  a.rank = int(dims.size());
  for (int i = 0; i < a.rank; ++i) a.dims[i] = dims[size_t(i)];
  a.data = buffer.untyped_data();
  return a;
}

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("longspan: " + message); }

// XLA allocates large results as new memory, whose first touch, page by page, costs a tenth of a forward pass. This
// asks the system for huge pages; without them, nothing changes.
void wish_for_huge_pages(void* data, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kHuge = uintptr_t(1) << 21;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t stop = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
  if (stop > start) madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE);
#endif
}

// The arguments that all handlers have in common.
struct Common {
  Call call;
  Built built;
  const Kernel* kernel = nullptr;
  std::vector<Array> own, results;
  std::string error;

  // The first `own_count` operands after q, k, v, starts and stops are specific to the handler.
  Common(ffi::RemainingArgs& args, ffi::RemainingRets& rets, size_t own_count, const ffi::Dictionary& attrs) {
    std::vector<Array> all;
    for (size_t i = 0; i < args.size() && error.empty(); ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) {
        error = "an operand is no buffer";
        return;
      }
      if (auto a = to_array(*buffer, error)) all.push_back(*a);
    }
    for (size_t i = 0; i < rets.size() && error.empty(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) {
        error = "a result is no buffer";
        return;
      }
      if (auto a = to_array(**buffer, error)) results.push_back(*a);
      wish_for_huge_pages((*buffer)->untyped_data(), (*buffer)->size_bytes());
    }
    if (!error.empty()) return;
    if (all.size() < 5 + own_count) {
      error = "too few operands: " + std::to_string(all.size());
      return;
    }
    call.q = all[0], call.k = all[1], call.v = all[2], call.starts = all[3], call.stops = all[4];
    own.assign(all.begin() + 5, all.begin() + 5 + long(own_count));
    call.rest.assign(all.begin() + 5 + long(own_count), all.end());
    if (!read(attrs)) return;
    error = build(call, built);
    if (error.empty()) kernel = choose_kernel(std::getenv("LONGSPAN_CPU_ISA"), error);
  }

  template <class T> T get(const ffi::Dictionary& attrs, const char* name, T otherwise) {
    auto value = attrs.get<T>(name);
    if (value.has_value()) return *value;
    error = std::string("attribute ") + name + " is missing or has the wrong type";
    return otherwise;
  }

  bool read(const ffi::Dictionary& attrs) {
    call.scale = get<double>(attrs, "scale", 1);
    call.soft_cap = get<double>(attrs, "soft_cap", 0);
    call.dropout_rate = get<double>(attrs, "dropout_rate", 0);
    call.dropout_threshold = uint32_t(get<int64_t>(attrs, "dropout_threshold", 0));
    call.q_tile = get<int64_t>(attrs, "q_tile", 1);
    call.kv_tile = get<int64_t>(attrs, "kv_tile", 1);
    const auto by_tiles = attrs.get<int64_t>("by_tiles");  // older exported programs do not have it
    call.by_tiles = by_tiles.has_value() && *by_tiles != 0;
    const auto of_table = attrs.get<int64_t>("of_table");
    call.of_table = of_table.has_value() && *of_table != 0;
    const auto heads_first = attrs.get<int64_t>("heads_first");  // only calls with this order have it
    call.heads_first = heads_first.has_value() && *heads_first != 0;
    const auto roles = get<ffi::Span<const int32_t>>(attrs, "roles", {});
    const auto program = get<ffi::Span<const int32_t>>(attrs, "program", {});
    call.roles.assign(roles.begin(), roles.end());
    if (call.roles.size() < kRoles) call.roles.resize(kRoles, -1);  // older exported programs lack the last ones
    call.program.assign(program.begin(), program.end());
    return error.empty();
  }
};

ffi::Error exhausted() { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "longspan: out of memory"); }

Given given(const Common& c) { return {c.own[0], c.own[1], c.own[2], c.own[3]}; }

void* writable(const Array& a) { return const_cast<void*>(a.data); }

ffi::Error forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  Common c(args, rets, 0, attrs);
  if (!c.error.empty()) return invalid(c.error);
  if (c.results.size() != 3) return invalid("forward has three results: out, lse, lse_low");
  const auto& r = c.results;
  const std::string error = check_forward(c.built.problem, r[0], r[1], r[2]);
  if (!error.empty()) return invalid(error);
  PoolRunner runner(pool);
  if (!c.kernel->forward(c.built.problem, {writable(r[0]), writable(r[1]), writable(r[2]), r[0].type}, runner))
    return exhausted();
  return ffi::Error::Success();
}

ffi::Error backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  Common c(args, rets, 4, attrs);
  if (!c.error.empty()) return invalid(c.error);
  const bool sloped = c.built.problem.by_distance.slopes != nullptr;
  if (c.results.size() != (sloped ? 6 : 5))
    return invalid("backward has five results: dq, dk, dv, scratch_dk, scratch_dv; and with slopes dslopes");
  Backward g;
  const auto& r = c.results;
  std::string error = check_backward(c.built.problem, given(c), r[0], r[1], r[2], r[3], r[4], g);
  if (error.empty() && sloped) error = check_slope_gradient(c.built.problem, r[5]);
  if (!error.empty()) return invalid(error);
  if (sloped) g.dslopes = writable(r[5]);
  g.dq = writable(r[0]), g.dk = writable(r[1]), g.dv = writable(r[2]);
  g.scratch_dk = writable(r[3]), g.scratch_dv = writable(r[4]);
  PoolRunner runner(pool);
  if (!c.kernel->backward(c.built.problem, g, runner)) return exhausted();
  return ffi::Error::Success();
}

ffi::Error bias_gradient(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         ffi::Dictionary attrs) {
  Common c(args, rets, 4, attrs);
  if (!c.error.empty()) return invalid(c.error);
  if (c.results.size() != 2) return invalid("bias_gradient has two results: dbias, scratch");
  BiasGradient g;
  const std::string error = check_bias_gradient(c.built.problem, c.call, given(c), c.results[0], c.results[1], g);
  if (!error.empty()) return invalid(error);
  g.dbias = writable(c.results[0]);
  g.scratch = writable(c.results[1]);
  PoolRunner runner(pool);
  if (!c.kernel->bias_gradient(c.built.problem, g, runner)) return exhausted();
  return ffi::Error::Success();
}

std::optional<int64_t> to_number(ffi::RemainingArgs& args, size_t at, std::string& error) {
  auto buffer = args.get<ffi::AnyBuffer>(at);
  const auto a = buffer.has_value() ? to_array(*buffer, error) : std::nullopt;
  if (a && a->type == I32 && a->rank == 0) return *static_cast<const int32_t*>(a->data);
  return error = "the layer must be int32 []", std::nullopt;
}

// One matrix of a product, or the matrix of a layer in a stack.
std::string to_matrix(const Array& w, const Array& y, int64_t layer, bool by_outer, int64_t rows, int64_t inner,
                      Matrix& m) {
  const int first = w.rank - 2;
  if (w.rank != 2 && w.rank != 3) return "a matrix must have two axes, or three with its layer";
  if (w.type != F32 && w.type != BF16) return "a matrix must be float32 or bfloat16";
  if (w.rank == 3 && (layer < 0 || layer >= w.dims[0])) return "there is no such layer";
  m.outer = w.dims[by_outer ? first : first + 1];
  if (w.dims[by_outer ? first + 1 : first] != inner) return "a matrix does not fit x";
  if (y.type != F32 || y.rank != 2 || y.dims[0] != rows || y.dims[1] != m.outer) return "a result does not fit";
  const int64_t bytes = w.type == BF16 ? 2 : 4;
  m.data = static_cast<const char*>(w.data) + (w.rank == 3 ? layer : 0) * inner * m.outer * bytes;
  m.type = w.type;
  m.y = static_cast<float*>(writable(y));
  return "";
}

ffi::Error product(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  const auto named = attrs.get<int64_t>("layer"), by_outer = attrs.get<int64_t>("by_outer");
  if (!by_outer.has_value()) return invalid("a product needs `by_outer`");
  const size_t first = named.has_value() ? 1 : 2;  // older exported programs have no layer operand
  if (rets.size() < 1 || rets.size() > size_t(kMaxMatrices) || args.size() != first + rets.size())
    return invalid("a product has x, the layer and one to eight matrices, and a result for each");
  std::string error;
  const auto layer = named.has_value() ? std::optional<int64_t>(*named) : to_number(args, 1, error);
  if (!layer) return invalid(error);
  auto x = args.get<ffi::AnyBuffer>(0);
  const auto rows = x.has_value() ? to_array(*x, error) : std::nullopt;
  if (!rows || rows->type != F32 || rows->rank != 2 || rows->dims[0] > kMaxRows)
    return invalid("x must be float32 [rows, inner] with at most 64 rows");
  Matrix matrices[kMaxMatrices];
  const Product p = {static_cast<const float*>(rows->data),
                     rows->dims[0],
                     rows->dims[1],
                     int64_t(rets.size()),
                     *by_outer != 0,
                     matrices};
  for (size_t i = 0; i < rets.size(); ++i) {
    auto w = args.get<ffi::AnyBuffer>(first + i);
    auto y = rets.get<ffi::AnyBuffer>(i);
    const auto given = w.has_value() ? to_array(*w, error) : std::nullopt;
    const auto result = y.has_value() ? to_array(**y, error) : std::nullopt;
    if (!given || !result) return invalid("a matrix or a result is no buffer");
    error = to_matrix(*given, *result, *layer, p.by_outer, p.rows, p.inner, matrices[i]);
    if (!error.empty()) return invalid(error);
  }
  const Kernel* kernel = choose_kernel(std::getenv("LONGSPAN_CPU_ISA"), error);
  if (!kernel) return invalid(error);
  PoolRunner runner(pool);
  return kernel->product(p, runner) ? ffi::Error::Success() : exhausted();
}

// Writes new rows [B, n, ...] of one layer into a stack [layers, B, slots, ...], in place: the result is the operand.
// With `heads_first` the stack is [layers, B, K, slots, H] and the rows are [B, n, K, H]. Slots out of range are
// skipped.
ffi::Error put(ffi::AnyBuffer stack, ffi::AnyBuffer which, ffi::AnyBuffer where, ffi::AnyBuffer rows,
               ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary attrs) {
  std::string error;
  const auto all = to_array(stack, error), layer = to_array(which, error), slots = to_array(where, error),
             added = to_array(rows, error);
  if (!all || !layer || !slots || !added) return invalid(error);
  const auto named = attrs.get<int64_t>("heads_first");  // only calls with this order have it
  const bool heads_first = named.has_value() && *named != 0;
  if (layer->type != I32 || layer->rank != 0) return invalid("the layer must be int32 []");
  if (all->rank < 3 || added->rank != all->rank - 1 || added->type != all->type)
    return invalid("new rows must be [B, n, ...] of the type of their stack [layers, B, slots, ...]");
  if (heads_first && all->rank != 5) return invalid("with heads first, a stack must be [layers, B, K, slots, H]");
  const int64_t B = added->dims[0], n = added->dims[1], layers = all->dims[0], heads = heads_first ? added->dims[2] : 1;
  const int slot_axis = heads_first ? 3 : 2;
  const int64_t count = all->dims[slot_axis];
  bool fits = all->dims[1] == B && slots->type == I32 && slots->rank == 2 && slots->dims[0] == B && slots->dims[1] == n;
  for (int i = 2; i < added->rank; ++i) fits = fits && added->dims[i] == all->dims[i + 1 == slot_axis ? i : i + 1];
  if (!fits || result->size_bytes() != stack.size_bytes()) return invalid("new rows do not fit their stack");
  const int32_t at = *static_cast<const int32_t*>(layer->data);
  if (at < 0 || at >= layers) return invalid("there is no layer " + std::to_string(at));
  char* to = static_cast<char*>(result->untyped_data());
  if (to != stack.untyped_data()) std::memcpy(to, stack.untyped_data(), stack.size_bytes());
  if (rows.size_bytes() == 0) return ffi::Error::Success();
  const size_t row = rows.size_bytes() / size_t(B * n * heads);
  for (int64_t i = 0; i < B * n; ++i) {
    const int64_t slot = static_cast<const int32_t*>(slots->data)[i];
    if (slot < 0 || slot >= count) continue;
    for (int64_t head = 0; head < heads; ++head)
      std::memcpy(to + size_t(((at * B + i / n) * heads + head) * count + slot) * row,
                  static_cast<const char*>(added->data) + size_t(i * heads + head) * row, row);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace longspan

#define LONGSPAN_EXPORT extern "C" __attribute__((visibility("default")))

#define LONGSPAN_HANDLER(name, fn)                                                                        \
  LONGSPAN_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {                                         \
    static auto* handler =                                                                                \
        ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs().To(fn).release(); \
    return handler->Call(frame);                                                                          \
  }

LONGSPAN_HANDLER(longspan_forward, longspan::forward)
LONGSPAN_HANDLER(longspan_backward, longspan::backward)
LONGSPAN_HANDLER(longspan_bias_gradient, longspan::bias_gradient)
LONGSPAN_HANDLER(longspan_product, longspan::product)

LONGSPAN_EXPORT XLA_FFI_Error* longspan_put(XLA_FFI_CallFrame* frame) {
  using Buffer = ffi::AnyBuffer;
  static auto* handler = ffi::Ffi::Bind()
                             .Arg<Buffer>()
                             .Arg<Buffer>()
                             .Arg<Buffer>()
                             .Arg<Buffer>()
                             .Ret<Buffer>()
                             .Attrs()
                             .To(longspan::put)
                             .release();
  return handler->Call(frame);
}

LONGSPAN_EXPORT int32_t longspan_abi() { return longspan::kAbi; }

// The instruction sets that this machine and build support, best first, separated by commas.
LONGSPAN_EXPORT const char* longspan_isas() {
  static const std::string names = [] {
    std::string s;
    for (const longspan::Kernel* k : longspan::kernels_here()) s += (s.empty() ? "" : ",") + std::string(k->name);
    return s;
  }();
  return names.c_str();
}
