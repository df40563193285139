// Rows of fp32, bf16 or fp16 values as vectors of floats, with tails; included by per-level units after simd.hpp's rules.
#pragma once

#include "cpu_support.hpp"
#include "simd.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

template <int T>
COMMITKV_INLINE float get(const void *row, int64_t i) {
  if (T == F32) return static_cast<const float *>(row)[i];
  const uint16_t half = static_cast<const uint16_t *>(row)[i];
  return T == BF16 ? bf16_to_float(half) : f16_to_float(half);
}

template <int T>
COMMITKV_INLINE void put(void *row, int64_t i, float x) {
  if (T == F32) {
    static_cast<float *>(row)[i] = x;
  } else {
    static_cast<uint16_t *>(row)[i] = T == BF16 ? float_to_bf16(x) : float_to_f16(x);
  }
}

// Values i to i + min(W, end - i) of the row; lanes beyond are 0. Reads nothing beyond.
template <int T>
COMMITKV_INLINE vf load_some(const void *row, int64_t i, int64_t end) {
  if (end - i >= W) {
    if (T == F32) return load(static_cast<const float *>(row) + i);
    const uint16_t *halves = static_cast<const uint16_t *>(row) + i;
    return T == BF16 ? load_bf16(halves) : load_f16(halves);
  }
  float lanes[W] = {};
  for (int64_t j = 0; j < end - i; ++j) lanes[j] = get<T>(row, i + j);
  return load(lanes);
}

template <int T>
COMMITKV_INLINE void store_some(void *row, int64_t i, int64_t end, vf x) {
  if (end - i >= W) {
    if (T == F32) return store(static_cast<float *>(row) + i, x);
    uint16_t *halves = static_cast<uint16_t *>(row) + i;
    return T == BF16 ? store_bf16(halves, x) : store_f16(halves, x);
  }
  float lanes[W];
  store(lanes, x);
  for (int64_t j = 0; j < end - i; ++j) put<T>(row, i + j, lanes[j]);
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
