// A thread pool for the tests, in place of XLA's.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../problem.h"

namespace {

class ThreadRunner final : public longspan::Runner {
 public:
  explicit ThreadRunner(int threads) : threads_(threads) {}
  bool run(int64_t tasks, longspan::TaskFn fn, void* ctx, size_t scratch_bytes) override {
    std::atomic<int64_t> next{0};
    auto work = [&] {
      void* scratch = std::aligned_alloc(64, (scratch_bytes + 127) / 64 * 64);
      std::memset(scratch, 0xFF, scratch_bytes);  // NaN everywhere, to detect reads before writes
      std::memset(scratch, 0, longspan::kFreshBytes);
      for (int64_t i; (i = next.fetch_add(1)) < tasks;) fn(ctx, i, scratch);
      std::free(scratch);
    };
    std::vector<std::thread> pool;
    for (int i = 1; i < threads_; ++i) pool.emplace_back(work);
    work();
    for (auto& t : pool) t.join();
    return true;
  }

 private:
  int threads_;
};

}  // namespace
