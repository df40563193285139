// One warp's 16 query rows in `attend`: logits of 16 keys, running softmax, weighted values. Included by attend.cu.
#pragma once

#include "kv_rows.cuh"

namespace {

// Running maxima rise in steps: a weight may reach 2^SLACK before earlier sums are scaled down again. Most keys then
// cost one vote instead of shuffles and HEAD_DIM / 2 products. Sums are fp32 and weights floating point: nothing is
// lost.
constexpr float SLACK = 8.0f;
constexpr int ALL_KEYS = BLOCK_ENTRIES,
              BEFORE_LIMITS = -2 * BLOCK_ENTRIES;  // entries are seen and recorded by every row

// What a query row may see and record, as page tokens counted from the start of its sequence; recorded: -1 if it does
// not. In shared memory, [QUERY_ROWS]: registers are scarce.
struct alignas(8) RowLimits {
  int32_t seen, recorded;
};
HW_DEVICE float query_factor(int m) { return QueryRows{QUERY_ROWS}.factor().load(m); }
HW_DEVICE Shared<int32_t> row_limits() { return shared<int32_t>(ROW_LIMITS_AT, 2 * QUERY_ROWS); }

// Keys of one step: where the rows of its two tiles of 8 begin in the stage, how many are filled, their first position.
struct StepKeys {
  int k_at[2], v_at[2], filled[2], position[2];
};

struct WarpRows {
  FragmentC out[HEAD_DIM / 8];  // tile j: columns 2t, 2t + 1 are channels 2j, 2j + 1 of lane t's list of values
  float top[2], sum[2];         // of rows g and g + 8; sum: this lane's part of it
  int first;                    // row of the tile that is row 0 here

  // Of row g (i = 0) or g + 8.
  HW_DEVICE RowLimits limits(int i) const { return row_limits().load_as<RowLimits>(2 * (first + lane() / 4 + 8 * i)); }

  HW_DEVICE void clear() {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) out[j] = FragmentC{{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = LOWEST, sum[i] = 0.0f;
  }

  // Makes the maxima cover `s`; the four lanes of a row agree.
  HW_DEVICE void raise(const FragmentC (&s)[2]) {
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = max_of(max_of(s[0].r[2 * i], s[0].r[2 * i + 1]), max_of(s[1].r[2 * i], s[1].r[2 * i + 1]));
    }
    if (!hw::any(most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) return;
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = max_of(most[i], shuffle_xor(most[i], 1));
      most[i] = max_of(max_of(most[i], shuffle_xor(most[i], 2)), top[i]);
      shrink[i] = fast_exp2(top[i] - most[i]);
      top[i] = most[i];
      sum[i] *= shrink[i];
    }
    scale_out(shrink);
  }

  HW_DEVICE void scale_out(const float (&by)[2]) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) out[j].r[r] *= by[r / 2];
    }
  }

  // Logits, in log2, -> weights as the first operand of p.v.
  template <bool FP16>
  HW_DEVICE FragmentA weigh(FragmentC (&s)[2]) {
    raise(s);
    FragmentA p;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = fast_exp2(s[n].r[2 * i] - top[i]), b = fast_exp2(s[n].r[2 * i + 1] - top[i]);
        sum[i] += a + b;
        p.r[2 * n + i] = FP16 ? pack2_fp16(a, b) : pack2(a, b);
      }
    }
    return p;
  }

  // Takes what a row must not see out of tile n of a step, brings logits to log2. bias: of the lane's two keys.
  HW_DEVICE void mask(FragmentC &s, int filled, const int (&seen)[2], Vec<float, 2> bias) const {
    const int key = 2 * (lane() % 4);
    const float factor[2] = {query_factor(first + lane() / 4), query_factor(first + lane() / 4 + 8)};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool visible = key + r % 2 < min_of(filled, seen[r / 2]);
      s.r[r] = visible ? s.r[r] * factor[r / 2] + bias[r % 2] : -infinity();
    }
  }

  // Keeps logits of 8 keys for attend_combine, in rows `stride` apart, of rows that record; -inf where they skip a key.
  // position: of the first key, below every limit for entries of blocks.
  HW_DEVICE void keep(float *logits, int stride, const FragmentC &s, int position) const {
    const int g = lane() / 4, key = 2 * (lane() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int recorded = limits(i).recorded;
      if (recorded < 0) continue;
      const float a = position + key < recorded ? s.r[2 * i] : -infinity();
      const float b = position + key + 1 < recorded ? s.r[2 * i + 1] : -infinity();
      float *to = logits + static_cast<int64_t>(g + 8 * i) * stride + key;
      store(reinterpret_cast<Vec<float, 2> *>(to), Vec<float, 2>{a, b});
    }
  }
};

// Values of 8 + 8 page tokens, and out += p v.
HW_DEVICE void add_page_values(WarpRows &rows, const FragmentA &p, Shared<uint8_t> stage, const StepKeys &keys) {
  const int g = lane() / 4;
  uint32_t low[LIST_PAIRS], high[LIST_PAIRS];
  HalfRow<V_RUN>::read(stage, keys.v_at[0] + g * PAGE_ROW_BYTES, g < keys.filled[0], low);
  HalfRow<V_RUN>::read(stage, keys.v_at[1] + g * PAGE_ROW_BYTES, g < keys.filled[1], high);
#pragma unroll
  for (int j = 0; j < LIST_PAIRS; ++j) {
    mma(rows.out[j], p, FragmentB{{transpose_8x8(low[j]), transpose_8x8(high[j])}});
  }
}

// The two fp16 that begin at byte `at`; zeros for keys that are not filled. key: of the first.
HW_DEVICE uint32_t filled_pair(Shared<uint8_t> stage, int at, int key, int filled) {
  const uint32_t mask = (key < filled ? 0x0000ffffu : 0u) | (key + 1 < filled ? 0xffff0000u : 0u);
  return stage.load_as<uint32_t>(at) & mask;
}

// The same of 8 + 8 entries of a quantized block, from entry `first` on.
HW_DEVICE void add_code_values(WarpRows &rows, const FragmentA &p, Shared<uint8_t> stage, int first,
                               const int (&filled)[2]) {
  constexpr int WORDS = V_ROW_BYTES / 16;
  const int g = lane() / 4, pair = 2 * (lane() % 4);
  uint32_t columns[2][LIST_PAIRS], scale[2], minimum[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t codes[WORDS];
    Row<V_ROW_BYTES, false>::read(stage, V_CODES + (first + 8 * n + g) * V_ROW_BYTES, g < filled[n], codes);
    ValueCodes<V_BITS, V_RUN>::unpack(codes, columns[n]);
    scale[n] = WHOLE_STEPS || filled[n] > 0 ? filled_pair(stage, V_SCALE + 2 * (first + 8 * n + pair), pair, filled[n]) : 0;
    minimum[n] = WHOLE_STEPS || filled[n] > 0 ? filled_pair(stage, V_MIN + 2 * (first + 8 * n + pair), pair, filled[n]) : 0;
  }
#pragma unroll
  for (int j = 0; j < LIST_PAIRS; ++j) {
    mma_fp16(
        rows.out[j], p,
        FragmentB{{fma2_fp16(columns[0][j], scale[0], minimum[0]), fma2_fp16(columns[1][j], scale[1], minimum[1])}});
  }
}

}  // namespace
