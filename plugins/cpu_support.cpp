// Built for the plain processor into every native library: see cpu_support.hpp.
#include "cpu_support.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "thread_pool.hpp"

namespace commitkv {

#if defined(__x86_64__)
// Linux hands out the tile registers on request only (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18).
static bool amx_allowed() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = (d >> 24 & 1) && (d >> 22 & 1);
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
  const bool avx512_bf16 = a >> 5 & 1;
  return tiles && avx512_bf16 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

bool processor_has(int32_t level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (level == AVX2) return avx2;
  if (level == AVX512) return avx512;
  if (level == AMX) return avx512 && amx_allowed();
#endif
  return level == PORTABLE;
}

void run_parallel(ParallelBody body, void *data, int32_t num_threads) {
  ThreadPool::shared().run(body, data, num_threads);
}

}  // namespace commitkv

extern "C" COMMITKV_EXPORT int32_t commitkv_processor_has(int32_t level) {
  return commitkv::processor_has(level) ? 1 : 0;
}
