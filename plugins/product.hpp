// A register-blocked product of small fp32 matrices; included by per-level units.
#pragma once

#include "simd.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

constexpr int ROWS = 6;                   // of the register block
constexpr int COLUMNS = W == 16 ? 4 : 2;  // its vectors

// c[R, N vectors] = c * factors (or 0) + a[R, depth] . b[depth, N vectors]
template <int R, int N>
static void product_block(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c,
                          int64_t c_stride, int64_t depth, const float *factors) {
  vf acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      acc[r][n] = factors ? load(c + r * c_stride + n * W) * set1(factors[r]) : set1(0.0f);
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    vf x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load(b + i * b_stride + n * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const vf y = set1(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = fma(y, x[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) store(c + r * c_stride + n * W, acc[r][n]);
  }
}

// One product c[rows, columns] (+)= a[rows, depth] . b[depth, columns]; columns is a multiple of W.
struct Product {
  const float *a;
  int64_t a_stride;
  const float *b;
  int64_t b_stride;
  float *c;
  int64_t c_stride, rows, depth;
  const float *factors;  // [rows] applied to c before; null: c is overwritten
};

template <int R, int N>
COMMITKV_INLINE void product_at(const Product &p, int64_t row, int64_t column) {
  product_block<R, N>(p.a + row * p.a_stride, p.a_stride, p.b + column, p.b_stride, p.c + row * p.c_stride + column,
                      p.c_stride, p.depth, p.factors ? p.factors + row : nullptr);
}

template <int N>
static void product_columns(const Product &p, int64_t column) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) product_at<ROWS, N>(p, row, column);
  for (; row + 2 <= p.rows; row += 2) product_at<2, N>(p, row, column);
  if (row < p.rows) product_at<1, N>(p, row, column);
}

static void product(const Product &p, int64_t columns) {
  int64_t column = 0;
  for (; column + COLUMNS * W <= columns; column += COLUMNS * W) product_columns<COLUMNS>(p, column);
  for (; column < columns; column += W) product_columns<1>(p, column);
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
