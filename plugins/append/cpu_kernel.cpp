// `append` on a CPU, for one instruction level: rotates q and k, writes k, v and a zero `seen` into page slots, in one
// pass over the rows. Rotation in fp32; channel i pairs with i + D/2.
#include "../row_pieces.hpp"
#include "../rows.hpp"

namespace commitkv {

// Mirrored field by field by `_Args` in native.py. G KV heads, Q query heads, D head_dim; strides in values per row.
struct AppendArgs {
  const char *q, *k, *v;     // [rows, Q or G, D] dtype, heads of a row side by side
  char *q_out;               // [rows, Q, D] dtype
  char *pages;               // [num_pages, G, 2, page_tokens, D] kv_dtype
  uint16_t *seen;            // [num_pages, G, page_tokens] fp16
  const float *cos, *sin;    // [rows, D/2] at rotary_stride
  const int64_t *slots;      // [rows]
  int64_t q_stride, k_stride, v_stride, rotary_stride;
  int64_t rows, q_heads, kv_heads, head_dim, page_tokens;
  int32_t dtype, kv_dtype, threads;
};

namespace COMMITKV_LEVEL {
namespace {

constexpr int64_t bytes_of(int type) { return type == F32 ? 4 : 2; }

template <int From, int To>
void rotate(const char *x, const float *cos, const float *sin, int64_t half, char *out) {
  const char *x2 = x + half * bytes_of(From);
  char *out2 = out + half * bytes_of(To);
  for (int64_t i = 0; i < half; i += W) {
    const vf a = load_some<From>(x, i, half), b = load_some<From>(x2, i, half);
    const vf c = load_some<F32>(cos, i, half), s = load_some<F32>(sin, i, half);
    store_some<To>(out, i, half, a * c - b * s);
    store_some<To>(out2, i, half, b * c + a * s);
  }
}

template <int From, int To>
void append_rows(const AppendArgs &a, int64_t first, int64_t last) {
  const int64_t half = a.head_dim / 2, from = bytes_of(From), to = bytes_of(To);
  for (int64_t row = first; row < last; ++row) {
    const float *cos = a.cos + row * a.rotary_stride, *sin = a.sin + row * a.rotary_stride;
    for (int64_t h = 0; h < a.q_heads; ++h) {
      const char *q = a.q + (row * a.q_stride + h * a.head_dim) * from;
      rotate<From, From>(q, cos, sin, half, a.q_out + (row * a.q_heads + h) * a.head_dim * from);
    }
    const int64_t page = a.slots[row] / a.page_tokens, offset = a.slots[row] % a.page_tokens;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      char *k = a.pages + ((page * a.kv_heads + h) * 2 * a.page_tokens + offset) * a.head_dim * to;
      char *v = k + a.page_tokens * a.head_dim * to;
      rotate<From, To>(a.k + (row * a.k_stride + h * a.head_dim) * from, cos, sin, half, k);
      const char *value = a.v + (row * a.v_stride + h * a.head_dim) * from;
      for (int64_t i = 0; i < a.head_dim; i += W) {
        store_some<To>(v, i, a.head_dim, load_some<From>(value, i, a.head_dim));
      }
      a.seen[(page * a.kv_heads + h) * a.page_tokens + offset] = 0;
    }
  }
}

template <int From>
decltype(RowJob<AppendArgs>::rows) rows_of(int32_t kv_dtype) {
  return kv_dtype == F32 ? append_rows<From, F32> : kv_dtype == BF16 ? append_rows<From, BF16> : append_rows<From, F16>;
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv

COMMITKV_ENTRY(commitkv_append)(const commitkv::AppendArgs *args) {
  using namespace commitkv;
  using namespace commitkv::COMMITKV_LEVEL;
  const AppendArgs &a = *args;
  const auto rows = a.dtype == F32    ? rows_of<F32>(a.kv_dtype)
                    : a.dtype == BF16 ? rows_of<BF16>(a.kv_dtype)
                                      : rows_of<F16>(a.kv_dtype);
  share_rows(a, (a.q_heads + 2 * a.kv_heads) * a.head_dim, a.threads, rows);
}
