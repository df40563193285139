// Committed blocks as bytes, exactly as `plugins.blocks` writes and reads them: scales and minima are rounded to fp16
// before codes are computed, and no product is fused with a sum (these units are built with -ffp-contract=off).
#pragma once

#include "../codes.hpp"
#include "../rows.hpp"
#include "cpu_plan.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

constexpr float FP16_MAX = 65504.0f;

static void widen_any(int32_t format, const uint8_t *row, int64_t dim, float *to) {
  switch (format) {
    case F32: return widen_row<F32>(row, dim, to);
    case BF16: return widen_row<BF16>(row, dim, to);
    case F16: return widen_row<F16>(row, dim, to);
    case I8: return widen_row<I8>(row, dim, to);
    default: return widen_row<I4>(row, dim, to);
  }
}

COMMITKV_INLINE bool quantized(int32_t format) { return format == I8 || format == I4; }

COMMITKV_INLINE float levels(int32_t format) { return format == I8 ? 255.0f : 15.0f; }

COMMITKV_INLINE uint16_t *halves(uint8_t *block, int64_t offset) { return reinterpret_cast<uint16_t *>(block + offset); }

// Widens the block's K scales; read_key of its entries may follow.
static void open_keys(const CommitArgs &a, const uint8_t *block, const RowRoom &room) {
  if (!quantized(a.k_format)) return;
  widen_f16(halves(block, a.k_scale), a.head_dim, room.scale);
  widen_f16(halves(block, a.k_min), a.head_dim, room.minimum);
}

static void read_key(const CommitArgs &a, const uint8_t *block, int64_t entry, const RowRoom &room, float *to) {
  widen_any(a.k_format, block + entry * code_row_bytes(a.k_format, a.head_dim), a.head_dim, to);
  if (!quantized(a.k_format)) return;
  for (int64_t d = 0; d < a.head_dim; ++d) to[d] = to[d] * room.scale[d] + room.minimum[d];
}

static void read_value(const CommitArgs &a, const uint8_t *block, int64_t entry, float *to) {
  widen_any(a.v_format, block + a.v_codes + entry * code_row_bytes(a.v_format, a.head_dim), a.head_dim, to);
  if (!quantized(a.v_format)) return;
  const float scale = f16_to_float(halves(block, a.v_scale)[entry]);
  const float minimum = f16_to_float(halves(block, a.v_min)[entry]);
  for (int64_t d = 0; d < a.head_dim; ++d) to[d] = to[d] * scale + minimum;
}

COMMITKV_INLINE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// fp16 minimum and scale whose codes span [low, high].
static void range(int32_t format, float low, float high, uint16_t &scale, uint16_t &minimum) {
  minimum = float_to_f16(clamp(low, -FP16_MAX, FP16_MAX));
  scale = float_to_f16(clamp((high - f16_to_float(minimum)) / levels(format), 0.0f, FP16_MAX));
}

COMMITKV_INLINE float code_of(float x, float scale, float minimum, float most) {
  return scale > 0.0f ? clamp(__builtin_rintf((x - minimum) / scale), 0.0f, most) : 0.0f;
}

// One row of values or, if quantized, of codes (whole numbers in `x`).
static void pack(int32_t format, const float *x, int64_t dim, uint8_t *to) {
  const int64_t half = dim / 2;
  switch (format) {
    case I8:
      for (int64_t d = 0; d < dim; ++d) to[d] = uint8_t(x[d]);
      return;
    case I4:
      for (int64_t d = 0; d < half; ++d) to[d] = uint8_t(uint8_t(x[d]) | uint8_t(x[d + half]) << 4);
      return;
    case F32:
      for (int64_t i = 0; i < dim; i += W) store_some<F32>(to, i, dim, load_some<F32>(x, i, dim));
      return;
    case BF16:
      for (int64_t i = 0; i < dim; i += W) store_some<BF16>(to, i, dim, load_some<F32>(x, i, dim));
      return;
    default:
      for (int64_t i = 0; i < dim; i += W) store_some<F16>(to, i, dim, load_some<F32>(x, i, dim));
  }
}

// Writes V of one entry; its scale is its own. `row` [D] is scratch.
static void write_value(const CommitArgs &a, uint8_t *block, int64_t entry, const float *value, float *row) {
  uint8_t *to = block + a.v_codes + entry * code_row_bytes(a.v_format, a.head_dim);
  if (!quantized(a.v_format)) return pack(a.v_format, value, a.head_dim, to);
  float low = value[0], high = value[0];
  for (int64_t d = 1; d < a.head_dim; ++d) {
    low = value[d] < low ? value[d] : low;
    high = value[d] > high ? value[d] : high;
  }
  uint16_t &scale16 = halves(block, a.v_scale)[entry], &min16 = halves(block, a.v_min)[entry];
  range(a.v_format, low, high, scale16, min16);
  const float scale = f16_to_float(scale16), minimum = f16_to_float(min16);
  for (int64_t d = 0; d < a.head_dim; ++d) row[d] = code_of(value[d], scale, minimum, levels(a.v_format));
  pack(a.v_format, row, a.head_dim, to);
}

// Writes K of entries [0, count), [count, stride] floats, scaled per channel over them.
static void write_keys(const CommitArgs &a, uint8_t *block, const float *keys, int64_t count, const RowRoom &room) {
  const int64_t dim = a.head_dim, row_bytes = code_row_bytes(a.k_format, dim);
  if (!quantized(a.k_format)) {
    for (int64_t e = 0; e < count; ++e) pack(a.k_format, keys + e * room.stride, dim, block + e * row_bytes);
    return;
  }
  float *low = room.scale, *high = room.minimum;
  for (int64_t d = 0; d < dim; ++d) low[d] = high[d] = keys[d];
  for (int64_t e = 1; e < count; ++e) {
    const float *key = keys + e * room.stride;
    for (int64_t d = 0; d < dim; ++d) {
      low[d] = key[d] < low[d] ? key[d] : low[d];
      high[d] = key[d] > high[d] ? key[d] : high[d];
    }
  }
  uint16_t *scale16 = halves(block, a.k_scale), *min16 = halves(block, a.k_min);
  for (int64_t d = 0; d < dim; ++d) range(a.k_format, low[d], high[d], scale16[d], min16[d]);
  widen_f16(scale16, dim, room.scale), widen_f16(min16, dim, room.minimum);
  const float most = levels(a.k_format);
  for (int64_t e = 0; e < count; ++e) {
    const float *key = keys + e * room.stride;
    for (int64_t d = 0; d < dim; ++d) room.rows[d] = code_of(key[d], room.scale[d], room.minimum[d], most);
    pack(a.k_format, room.rows, dim, block + e * row_bytes);
  }
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
