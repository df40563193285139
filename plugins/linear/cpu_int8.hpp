// Rows of x as products with INT8 weights take them, and those products.
//
// Vector registers multiply INT8 weights as 16-bit integers, two products and their sum to an instruction; to make
// floats of weights would take two instructions for each one that multiplies. GROUP inputs of a row share a unit, a
// power of two, x = unit * integer: what is lost is at most 2^-15 of the group's largest, nothing at all of bf16 values
// down to 1/128 of it, and an outlier spoils nothing beyond its group. Sums of a group are exact and are added up as
// fp32, group after group. A group with a NaN or an infinity has a NaN for its unit, and so have all outputs of the
// row.
//
// The portable level multiplies fp32.
#pragma once

#include "../rows.hpp"
#include "cpu_ahead.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

#if defined(__AVX2__)

// At most GROUP * 2^15 * 2^7 = 2^29: no sum of a group leaves 32 bits.
constexpr int64_t GROUP = 128;

struct Int8Rows {
  static constexpr int64_t BLOCK_BYTES = 16;  // of 16 outputs per input

  int64_t in, groups;
  int16_t *values;  // [rows, in]
  float *units;     // [rows, groups]

  // In room for rows * in floats, in being a multiple of 32.
  Int8Rows(int64_t inputs, int64_t rows, float *room)
      : in(inputs),
        groups((inputs + GROUP - 1) / GROUP),
        values(reinterpret_cast<int16_t *>(room)),
        units(reinterpret_cast<float *>(values + rows * inputs)) {}

  template <int T>
  void take(const void *x, int64_t row) const {
    for (int64_t k = 0, group = 0; k < in; k += GROUP, ++group) {
      units[row * groups + group] = take_group<T>(x, row * in + k, group_end(k) - k);
    }
  }

  // sums += R rows from `row` on times B blocks of 16 outputs, each [in / 2, 16 outputs, 2 inputs].
  template <int R, int B>
  COMMITKV_INLINE void add_blocks(const Int8Rows &x, int64_t row, const char *weight, int64_t apart, BlocksAhead ahead,
                                  vf sums[R][B * 16 / W]) {
    constexpr int N = 16 / W;
    const int16_t *values = x.values + row * x.in;
    for (int64_t k = 0, group = 0; k < x.in; ++group) {
      vi exact[R][B * N];
      clear<R, B * N>(exact);
      for (const int64_t end = x.group_end(k); k < end; k += 4) {
        ahead.fetch<B>();
#pragma GCC unroll 2
        for (int pair = 0; pair < 4; pair += 2) {
#pragma GCC unroll 16
          for (int i = 0; i < B * N; ++i) {
            const char *at = weight + i / N * apart + (k + pair) * BLOCK_BYTES + i % N * 2 * W;
            const vi y = load_i8_as_i16(reinterpret_cast<const int8_t *>(at));
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
              exact[r][i] = add_products(load_pair(values + r * x.in + k + pair), y, exact[r][i]);
            }
          }
        }
      }
      x.add_exact<R, B * N>(exact, row, group, sums);
    }
  }

  // totals: products of R rows from `row` on with four rows of the table, `apart` bytes from one to the next.
  template <int R>
  COMMITKV_INLINE void multiply_tokens(const Int8Rows &x, int64_t row, const char *table, int64_t apart,
                                       TokensAhead ahead, float totals[R][4]) {
    const int16_t *values = x.values + row * x.in;
    vf sums[R];
    for (int r = 0; r < R; ++r) sums[r] = set1(0.0f);
    for (int64_t k = 0, group = 0; k < x.in; ++group) {
      vi exact[R][4];
      clear<R, 4>(exact);
      const int64_t end = x.group_end(k);
      ahead.fetch<GROUP>(k);
      for (; k < end; k += 2 * W) {
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) {
          const vi y = load_i8_as_i16(reinterpret_cast<const int8_t *>(table + t * apart + k));
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) exact[r][t] = add_products(y, load_i16(values + r * x.in + k), exact[r][t]);
        }
      }
      for (int r = 0; r < R; ++r) {
        const vi sum = add_neighbours(exact[r][0], exact[r][1], exact[r][2], exact[r][3]);
        sums[r] = fma(to_float(sum), set1(x.units[(row + r) * x.groups + group]), sums[r]);
      }
    }
    for (int r = 0; r < R; ++r) fold4(sums[r], totals[r]);
  }

 private:
  int64_t group_end(int64_t k) const { return k + GROUP < in ? k + GROUP : in; }

  // values[first, first + count); returns their unit.
  template <int T>
  float take_group(const void *x, int64_t first, int64_t count) const {
    vf largest = set1(0.0f), nothing = set1(0.0f);
    for (int64_t i = first; i < first + count; i += W) {
      const vf y = load_some<T>(x, i, first + count);
      largest = vmax(largest, vmax(y, set1(0.0f) - y));
      nothing = fma(y, set1(0.0f), nothing);  // NaN where y is not finite
    }
    // 2^14 units are the largest power of two in the group. Below 2^-112 a unit would not be a normal number.
    const uint32_t found = float_to_bits(hmax(largest)) >> 23 & 255, exponent = found < 15 ? 15 : found;
    const vf by = set1(bits_to_float((268 - exponent) << 23));
    for (int64_t i = first; i < first + count; i += 2 * W) {
      const vf a = load_some<T>(x, i, first + count), b = load_some<T>(x, i + W, first + count);
      store_i16(values + i, a * by, b * by);
    }
    return bits_to_float((exponent - 14) << 23) + hsum(nothing);
  }

  template <int R, int N>
  COMMITKV_INLINE void clear(vi exact[R][N]) {
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) exact[r][i] = zero_i();
    }
  }

  template <int R, int N>
  __attribute__((always_inline)) void add_exact(const vi exact[R][N], int64_t row, int64_t group, vf sums[R][N]) const {
    for (int r = 0; r < R; ++r) {
      const vf unit = set1(units[(row + r) * groups + group]);
      for (int i = 0; i < N; ++i) sums[r][i] = fma(to_float(exact[r][i]), unit, sums[r][i]);
    }
  }
};

#else

struct Int8Rows {
  static constexpr int64_t BLOCK_BYTES = 16;

  int64_t in;
  float *values;  // [rows, in]

  Int8Rows(int64_t inputs, int64_t, float *room) : in(inputs), values(room) {}

  template <int T>
  void take(const void *x, int64_t row) const {
    for (int64_t i = row * in; i < (row + 1) * in; i += W) store(values + i, load_some<T>(x, i, (row + 1) * in));
  }

  template <int R, int B>
  COMMITKV_INLINE void add_blocks(const Int8Rows &x, int64_t row, const char *weight, int64_t apart, BlocksAhead,
                                  vf sums[R][B * 16 / W]) {
    const float *values = x.values + row * x.in;
    for (int64_t k = 0; k < x.in; k += 2) {
#pragma GCC unroll 2
      for (int input = 0; input < 2; ++input) {
#pragma GCC unroll 16
        for (int i = 0; i < B * 16 / W; ++i) {
          const char *at = weight + i * W / 16 * apart + k * BLOCK_BYTES + i * W % 16 * 2 + input;
          const int8_t *codes = reinterpret_cast<const int8_t *>(at);
          const vf y = {float(codes[0]), float(codes[2]), float(codes[4]), float(codes[6])};
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sums[r][i] = fma(set1(values[r * x.in + k + input]), y, sums[r][i]);
        }
      }
    }
  }

  template <int R>
  COMMITKV_INLINE void multiply_tokens(const Int8Rows &x, int64_t row, const char *table, int64_t apart, TokensAhead,
                                       float totals[R][4]) {
    vf sums[R][4] = {};
    for (int64_t k = 0; k < x.in; k += W) {
      for (int t = 0; t < 4; ++t) {
        const vf y = load_i8(reinterpret_cast<const int8_t *>(table + t * apart + k));
        for (int r = 0; r < R; ++r) sums[r][t] = fma(load(x.values + (row + r) * x.in + k), y, sums[r][t]);
      }
    }
    for (int r = 0; r < R; ++r) reduce4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], totals[r]);
  }
};

#endif

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
