// Chooses the kernel: the widest instruction set that both the build and this machine support.
#include <cstring>

#include "program.h"

namespace longspan {

namespace baseline { extern const Kernel kernel; }
#ifdef LONGSPAN_X86
namespace avx2 { extern const Kernel kernel; }
namespace avx512 { extern const Kernel kernel; }
#endif

std::vector<const Kernel*> kernels_here() {
  std::vector<const Kernel*> all;
#ifdef LONGSPAN_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    all.push_back(&avx512::kernel);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.push_back(&avx2::kernel);
#endif
  all.push_back(&baseline::kernel);
  return all;
}

const Kernel* choose_kernel(const char* forced, std::string& error) {
  const std::vector<const Kernel*> here = kernels_here();
  if (!forced || !*forced) return here.front();
  std::string names;
  for (const Kernel* k : here) {
    if (!std::strcmp(k->name, forced)) return k;
    names += std::string(names.empty() ? "" : ", ") + k->name;
  }
  error = std::string("LONGSPAN_CPU_ISA=") + forced + " cannot run here; this machine and build have: " + names;
  return nullptr;
}

}  // namespace longspan
