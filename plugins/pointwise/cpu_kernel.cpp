// RMS norm, residual sum with RMS norm, and gated SiLU on a CPU, for one instruction level. fp32 inside; a row is
// always reduced by one thread in one order, so results do not depend on the number of threads.
#include "../row_pieces.hpp"
#include "../rows.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {
namespace {

struct Norm {
  const char *x, *delta;  // delta null: x is normalised as it is
  const float *weight;
  char *sum, *out;
  int64_t rows, heads, row_stride, dim;  // row r, head h of x begins at value r * row_stride + h * dim
  float eps;
};

template <int T>
void norm_row(const Norm &n, int64_t row, int64_t head) {
  const int64_t bytes = T == F32 ? 4 : 2, at = (row * n.heads + head) * n.dim * bytes;
  const char *x = n.x + (row * n.row_stride + head * n.dim) * bytes;
  if (n.delta) {
    char *sum = n.sum + at;
    for (int64_t i = 0; i < n.dim; i += W) {
      store_some<T>(sum, i, n.dim, load_some<T>(x, i, n.dim) + load_some<T>(n.delta + at, i, n.dim));
    }
    x = sum;  // what is normalised is the sum as it is stored
  }
  vf even = set1(0.0f), odd = set1(0.0f);
  int64_t i = 0;
  for (; i + 2 * W <= n.dim; i += 2 * W) {
    const vf a = load_some<T>(x, i, n.dim), b = load_some<T>(x, i + W, n.dim);
    even = fma(a, a, even), odd = fma(b, b, odd);
  }
  for (; i < n.dim; i += W) {
    const vf a = load_some<T>(x, i, n.dim);
    even = fma(a, a, even);
  }
  const vf scale = set1(1.0f / __builtin_sqrtf(hsum(even + odd) / float(n.dim) + n.eps));
  for (i = 0; i < n.dim; i += W) {
    const vf y = load_some<T>(x, i, n.dim) * scale * load_some<F32>(n.weight, i, n.dim);
    store_some<T>(n.out + at, i, n.dim, y);
  }
}

// e^x holds up to x = 87, and beyond that x / (1 + e^x) is nothing beside the smallest bf16 that matters.
COMMITKV_INLINE vf silu(vf x) {
  const vf minus = set1(0.0f) - x;
  const vf limited = set1(0.0f) - vmax(set1(0.0f) - minus, set1(-87.0f));
  return x / (set1(1.0f) + exp_nonpositive(limited));
}

struct Gate {
  const char *gate_up;
  char *out;
  int64_t rows, dim;
};

template <int T>
void gate_row(const Gate &g, int64_t row) {
  const int64_t bytes = T == F32 ? 4 : 2;
  const char *gate = g.gate_up + row * 2 * g.dim * bytes, *up = gate + g.dim * bytes;
  for (int64_t i = 0; i < g.dim; i += W) {
    const vf y = silu(load_some<T>(gate, i, g.dim)) * load_some<T>(up, i, g.dim);
    store_some<T>(g.out + row * g.dim * bytes, i, g.dim, y);
  }
}

template <int T>
void norm_rows(const Norm &n, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    for (int64_t head = 0; head < n.heads; ++head) norm_row<T>(n, row, head);
  }
}

template <int T>
void gate_rows(const Gate &g, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) gate_row<T>(g, row);
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv

using namespace commitkv;

// out = x / sqrt(mean(x^2) + eps) * weight per head of each row; with delta: sum = x + delta, and out is of the sum.
// x: see Norm; delta, sum, out [rows, heads, dim]; sum may be x or delta.
COMMITKV_ENTRY(commitkv_rms_norm)
(const char *x, const char *delta, const float *weight, char *sum, char *out, int64_t rows, int64_t heads,
 int64_t row_stride, int64_t dim, float eps, int32_t dtype, int32_t threads) {
  using namespace COMMITKV_LEVEL;
  const Norm n = {x, delta, weight, sum, out, rows, heads, row_stride, dim, eps};
  share_rows(n, heads * dim, threads, dtype == F32 ? norm_rows<F32> : dtype == BF16 ? norm_rows<BF16> : norm_rows<F16>);
}

// out [rows, dim] = silu(first half) * second half of gate_up [rows, 2 * dim].
COMMITKV_ENTRY(commitkv_gated_silu)
(const char *gate_up, char *out, int64_t rows, int64_t dim, int32_t dtype, int32_t threads) {
  using namespace COMMITKV_LEVEL;
  const Gate g = {gate_up, out, rows, dim};
  share_rows(g, dim, threads, dtype == F32 ? gate_rows<F32> : dtype == BF16 ? gate_rows<BF16> : gate_rows<F16>);
}
