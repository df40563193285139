// Codes of pages and committed blocks as floats; included by per-level units.
#pragma once

#include "cpu_support.hpp"
#include "simd.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

// Vector i of a row of codes: channels [i * W, i * W + W).
template <int Format>
COMMITKV_INLINE vf codes(const uint8_t *row, int64_t i, int64_t dim) {
  if (Format == F32) return load(reinterpret_cast<const float *>(row) + i * W);
  if (Format == BF16) return load_bf16(reinterpret_cast<const uint16_t *>(row) + i * W);
  if (Format == F16) return load_f16(reinterpret_cast<const uint16_t *>(row) + i * W);
  if (Format == I8) return load_u8(row + i * W);
  const int64_t half = dim / 2;
  return i * W < half ? load_u4_low(row + i * W) : load_u4_high(row + i * W - half);
}

// Channels [0, dim) of one row of codes as floats.
template <int Format>
static void widen_row(const uint8_t *row, int64_t dim, float *to) {
  const bool whole = Format == I4 ? dim / 2 % W == 0 : dim % W == 0;
  const int64_t vectors = whole || Format != I4 ? dim / W : 0;
  for (int64_t i = 0; i < vectors; ++i) store(to + i * W, codes<Format>(row, i, dim));
  for (int64_t d = vectors * W; d < dim; ++d) {
    if (Format == F32) to[d] = reinterpret_cast<const float *>(row)[d];
    if (Format == BF16) to[d] = bf16_to_float(reinterpret_cast<const uint16_t *>(row)[d]);
    if (Format == F16) to[d] = f16_to_float(reinterpret_cast<const uint16_t *>(row)[d]);
    if (Format == I8) to[d] = float(row[d]);
    if (Format == I4) to[d] = float(d < dim / 2 ? row[d] & 15 : row[d - dim / 2] >> 4);
  }
}

COMMITKV_INLINE const uint16_t *halves(const uint8_t *block, int64_t offset) {
  return reinterpret_cast<const uint16_t *>(block + offset);
}

// to[0, count) = fp16 from[0, count); reads nothing beyond.
COMMITKV_INLINE void widen_f16(const uint16_t *from, int64_t count, float *to) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load_f16(from + i));
  for (; i < count; ++i) to[i] = f16_to_float(from[i]);
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
