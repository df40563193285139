// The words of hw.cuh for NVIDIA GPUs, as inline PTX. Include hw.cuh, not this file.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define HW_DEVICE __device__ __forceinline__
#define HW_KERNEL(name, Params, THREADS, MIN_BLOCKS) \
  extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) name(const __grid_constant__ Params p)

#ifdef HW_DEBUG
#define HW_CHECK(condition, what) \
  do {                            \
    if (!(condition)) __trap();   \
  } while (0)
#else
#define HW_CHECK(condition, what) \
  do {                            \
  } while (0)
#endif

// The dynamic shared memory of the launch.
extern __shared__ __align__(128) uint8_t hw_shared_memory[];

namespace hw {

constexpr uint32_t ALL_LANES = 0xffffffffu;

HW_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
HW_DEVICE int lane() { return static_cast<int>(threadIdx.x % 32); }
// Broadcast, so that the compiler knows that branches on it do not diverge.
HW_DEVICE int warp() { return __shfl_sync(ALL_LANES, static_cast<int>(threadIdx.x / 32), 0); }
HW_DEVICE int block() { return static_cast<int>(blockIdx.x); }
HW_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
HW_DEVICE int num_blocks() { return static_cast<int>(gridDim.x); }

// ---- values

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
  HW_DEVICE T &operator[](int i) { return v[i]; }
  HW_DEVICE const T &operator[](int i) const { return v[i]; }
};

template <typename To, typename From>
HW_DEVICE To bit_cast(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

using Fp16 = __half;
using Bf16 = __nv_bfloat16;

HW_DEVICE float to_float(Fp16 x) { return __half2float(x); }
HW_DEVICE float to_float(Bf16 x) { return __bfloat162float(x); }
HW_DEVICE float to_float(float x) { return x; }

template <typename T>
HW_DEVICE T from_float(float x);
template <>
HW_DEVICE Fp16 from_float<Fp16>(float x) {
  return __float2half_rn(x);
}
template <>
HW_DEVICE Bf16 from_float<Bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
HW_DEVICE float from_float<float>(float x) {
  return x;
}

HW_DEVICE float infinity() { return __int_as_float(0x7f800000); }
HW_DEVICE float inverse_sqrt(float x) { return rsqrtf(x); }
HW_DEVICE float fast_max(float a, float b) { return fmaxf(a, b); }
HW_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
HW_DEVICE float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
HW_DEVICE float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
HW_DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// ---- warps and blocks

HW_DEVICE void warp_sync() { __syncwarp(); }
HW_DEVICE void block_sync() { __syncthreads(); }
HW_DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
template <typename T>
HW_DEVICE T shuffle(T x, int source_lane) {
  return __shfl_sync(ALL_LANES, x, source_lane);
}
template <typename T>
HW_DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(ALL_LANES, x, mask);
}
template <typename T>
HW_DEVICE T shuffle_down(T x, int distance) {
  return __shfl_down_sync(ALL_LANES, x, distance);
}
HW_DEVICE bool any(bool x) { return __any_sync(ALL_LANES, x) != 0; }
HW_DEVICE uint32_t ballot(bool x) { return __ballot_sync(ALL_LANES, x); }

// ---- shared memory

template <typename T>
struct Shared {
  T *data;

  HW_DEVICE T load(int i) const { return data[i]; }
  HW_DEVICE void store(int i, T x) const { data[i] = x; }
  template <typename U>
  HW_DEVICE U load_as(int i) const {
    return *reinterpret_cast<const U *>(data + i);
  }
  template <typename U>
  HW_DEVICE void store_as(int i, U x) const {
    *reinterpret_cast<U *>(data + i) = x;
  }
  template <typename U>
  HW_DEVICE Shared<U> cast() const {
    return {reinterpret_cast<U *>(data)};
  }
  HW_DEVICE Shared<T> at(int i, int) const { return {data + i}; }
};

template <typename T>
HW_DEVICE Shared<T> shared(int byte_offset, int) {
  return {reinterpret_cast<T *>(hw_shared_memory + byte_offset)};
}

HW_DEVICE uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- global memory

template <typename T>
HW_DEVICE T load(const T *p) {
  return *p;
}
// A row of K or V that no other block reads: it takes no place in L1.
template <typename T>
HW_DEVICE T load_stream(const T *p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "one load instruction");
  if constexpr (sizeof(T) == 16) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return bit_cast<T>(x);
  } else if constexpr (sizeof(T) == 8) {
    uint64_t x;
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(x) : "l"(p));
    return bit_cast<T>(x);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t x;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return bit_cast<T>(x);
  } else {
    uint16_t x;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(x) : "l"(p));
    return bit_cast<T>(x);
  }
}
template <typename T>
HW_DEVICE void store(T *p, T x) {
  *p = x;
}
template <typename T>
HW_DEVICE T atomic_add(T *p, T x) {
  return atomicAdd(p, x);
}
// Values >= 0 only: their bits then order as integers do. Most calls find a larger value and stop at the load.
HW_DEVICE void atomic_max(Fp16 *p, float value) {
  unsigned short *bits = reinterpret_cast<unsigned short *>(p);
  const unsigned short wanted = __half_as_ushort(__float2half_rn(value));
  unsigned short seen = *reinterpret_cast<volatile unsigned short *>(bits);
  while (seen < wanted) {
    const unsigned short found = atomicCAS(bits, seen, wanted);
    if (found == seen) break;
    seen = found;
  }
}
HW_DEVICE void thread_fence() { __threadfence(); }

}  // namespace hw

#include "hw_async.cuh"
#include "hw_mma.cuh"
