// `append`: rotary embedding of queries and keys; keys and values go to their slots of the active pages.
//
//   q [rows, q_heads, D], k, v [rows, G, D] Half, heads of a row side by side, rows `*_stride` elements apart
//   cos, sin [rows, >= D / 2] fp32, rows `rotary_stride` floats apart
//   slots [rows]: page * PAGE_TOKENS + offset; -1: a row of padding, whose K and V go nowhere
//   pages [num_pages, G, 2, PAGE_TOKENS, D] Half, seen [num_pages, G, PAGE_TOKENS] fp16: one layer's
//   q_out [rows, q_heads, D] Half: rotated queries, of padding rows too, so that no later layer meets garbage
//
// Called once per layer and step, from append/cuda.py and the TensorRT plugin. Bound by bytes: every thread moves 16 of
// each half of a head, so that 8 consecutive threads (D = 128) touch 256 contiguous bytes.
#include "hw.cuh"

namespace {

using namespace hw;

struct AppendParams {
  const Half *q, *k, *v;
  Half *q_out, *pages;
  Fp16 *seen;
  const float *cos, *sin;
  const int32_t *slots;
  int64_t q_stride, k_stride, v_stride, rotary_stride;
  int32_t rows, q_heads, kv_heads, num_slots;
};

constexpr int HALF_DIM = HEAD_DIM / 2;
constexpr int CHANNELS = 8;                        // of each half of a head that a thread turns: 16 bytes
constexpr int THREADS_PER_HEAD = HALF_DIM / CHANNELS;
static_assert(HALF_DIM % CHANNELS == 0, "16-byte accesses");

using Halves = Vec<uint32_t, CHANNELS / 2>;
using Floats = Vec<float, 4>;

// Turns channel pairs (i, i + D / 2), i in [first, first + CHANNELS), of `from` by the row's angles.
HW_DEVICE void rotate(const AppendParams &p, int row, int first, const Half *from, Half *low_to, Half *high_to) {
  const Halves low = load_stream(reinterpret_cast<const Halves *>(from + first));
  const Halves high = load_stream(reinterpret_cast<const Halves *>(from + HALF_DIM + first));
  const float *cos = p.cos + row * p.rotary_stride + first, *sin = p.sin + row * p.rotary_stride + first;
  Halves low_out, high_out;
#pragma unroll
  for (int i = 0; i < CHANNELS / 4; ++i) {
    const Floats c = load(reinterpret_cast<const Floats *>(cos) + i);
    const Floats s = load(reinterpret_cast<const Floats *>(sin) + i);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Vec<float, 2> x = unpack2(low[2 * i + j]), y = unpack2(high[2 * i + j]);
      const float c0 = c[2 * j], c1 = c[2 * j + 1], s0 = s[2 * j], s1 = s[2 * j + 1];
      low_out[2 * i + j] = pack2(x[0] * c0 - y[0] * s0, x[1] * c1 - y[1] * s1);
      high_out[2 * i + j] = pack2(y[0] * c0 + x[0] * s0, y[1] * c1 + x[1] * s1);
    }
  }
  store(reinterpret_cast<Halves *>(low_to), low_out);
  store(reinterpret_cast<Halves *>(high_to), high_out);
}

HW_DEVICE void copy_halves(const Half *from, Half *to) {
  store(reinterpret_cast<Halves *>(to), load_stream(reinterpret_cast<const Halves *>(from)));
}

// The part of head `head` of `row` that thread `part` of its threads handles. Heads: queries, then keys, then values.
HW_DEVICE void append_part(const AppendParams &p, int row, int head, int part) {
  const int first = part * CHANNELS;
  if (head < p.q_heads) {
    Half *to = p.q_out + (static_cast<int64_t>(row) * p.q_heads + head) * HEAD_DIM + first;
    return rotate(p, row, first, p.q + row * p.q_stride + head * HEAD_DIM, to, to + HALF_DIM);
  }
  const int slot = load(p.slots + row);
  HW_CHECK(slot < p.num_slots, "append: a slot outside the pages");
  if (slot < 0) return;
  const int page = slot / PAGE_TOKENS, offset = slot % PAGE_TOKENS;
  const bool is_key = head < p.q_heads + p.kv_heads;
  const int kv_head = head - p.q_heads - (is_key ? 0 : p.kv_heads);
  const int64_t page_head = static_cast<int64_t>(page) * p.kv_heads + kv_head;
  Half *to = p.pages + ((page_head * 2 + (is_key ? 0 : 1)) * PAGE_TOKENS + offset) * HEAD_DIM + first;
  if (is_key) {
    if (part == 0) store(p.seen + page_head * PAGE_TOKENS + offset, from_float<Fp16>(0.0f));
    return rotate(p, row, first, p.k + row * p.k_stride + kv_head * HEAD_DIM, to, to + HALF_DIM);
  }
  const Half *from = p.v + row * p.v_stride + kv_head * HEAD_DIM + first;
  copy_halves(from, to);
  copy_halves(from + HALF_DIM, to + HALF_DIM);
}

}  // namespace

HW_KERNEL(append_rows, AppendParams, 256, 4) {
  const int heads = p.q_heads + 2 * p.kv_heads, per_row = heads * THREADS_PER_HEAD;
  const int64_t total = static_cast<int64_t>(p.rows) * per_row;
  const int64_t step = static_cast<int64_t>(num_blocks()) * num_threads();
  for (int64_t i = static_cast<int64_t>(block()) * num_threads() + thread(); i < total; i += step) {
    const int row = static_cast<int>(i / per_row), rest = static_cast<int>(i % per_row);
    append_part(p, row, rest / THREADS_PER_HEAD, rest % THREADS_PER_HEAD);
  }
}
