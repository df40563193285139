// One warp's 16 query rows in `attend`: logits of 16 keys, running softmax, weighted values. Included by attend.cu.
#pragma once

#include "kv_rows.cuh"

namespace {

// Running maxima rise in steps: a weight may reach 2^SLACK before earlier sums are scaled down again. Most keys then
// cost one vote instead of shuffles and HEAD_DIM / 2 products. Sums are fp32 and weights floating point: nothing is
// lost.
constexpr float SLACK = 2.0f;  // 4 times the largest scale of 4-bit values is still an fp16
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

HW_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

struct WarpRows {
  FragmentC out[HEAD_DIM / 8];  // tile j: columns 2t, 2t + 1 are channels 2j, 2j + 1 of lane t's list of values
  float top[2], sum[2];         // of rows g and g + 8; sum: this lane's part of it
  float low[2];                 // weighted minima of quantized values, this lane's part; between enter and leave
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
  template <bool CODES>
  HW_DEVICE void raise(const FragmentC (&s)[2]) {
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fast_max(fast_max(s[0].r[2 * i], s[0].r[2 * i + 1]), fast_max(s[1].r[2 * i], s[1].r[2 * i + 1]));
    }
    if (!hw::any(most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) return;
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fast_max(most[i], shuffle_xor(most[i], 1));
      most[i] = fast_max(fast_max(most[i], shuffle_xor(most[i], 2)), top[i]);
      shrink[i] = fast_exp2(top[i] - most[i]);
      top[i] = most[i];
      sum[i] *= shrink[i];
      if (CODES) low[i] *= shrink[i];
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
  HW_DEVICE FragmentA weigh(const FragmentC (&s)[2]) {
    raise<false>(s);
    FragmentA p;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = fast_exp2(s[n].r[2 * i] - top[i]), b = fast_exp2(s[n].r[2 * i + 1] - top[i]);
        sum[i] += a + b;
        p.r[2 * n + i] = pack2(a, b);
      }
    }
    return p;
  }

  // The same for codes: weights times the scales of the lane's keys, and `low`. scale, minimum: of keys (2t, 2t + 1).
  HW_DEVICE FragmentA weigh_codes(const FragmentC (&s)[2], const uint32_t (&scale)[2], const uint32_t (&minimum)[2]) {
    raise<true>(s);
    FragmentA p;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Vec<Fp16, 2> least = bit_cast<Vec<Fp16, 2>>(minimum[n]);
      const float least_a = to_float(least[0]), least_b = to_float(least[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = fast_exp2(s[n].r[2 * i] - top[i]), b = fast_exp2(s[n].r[2 * i + 1] - top[i]);
        sum[i] += a + b;
        low[i] += a * least_a + b * least_b;
        p.r[2 * n + i] = multiply2_fp16(pack2_fp16(a, b), scale[n]);
      }
    }
    return p;
  }

  // Codes enter `out` as subnormals. enter: brings what is there to their scale; leave: back, with the minima.
  HW_DEVICE void enter_codes() {
    low[0] = low[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < LIST_PAIRS; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) out[j].r[r] *= is_high(V_BITS, j) ? 0x1p-20f : 0x1p-24f;
    }
  }
  HW_DEVICE void leave_codes() {
    const float row_low[2] = {quad_sum(low[0]), quad_sum(low[1])};
#pragma unroll
    for (int j = 0; j < LIST_PAIRS; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        out[j].r[r] = out[j].r[r] * (is_high(V_BITS, j) ? 0x1p20f : 0x1p24f) + row_low[r / 2];
      }
    }
  }

  // Takes what a row must not see out of tile n of a step, brings logits to log2: unit * s + start, times the row's
  // factor, plus the bias of the lane's two keys. start: by row, in log2 already.
  HW_DEVICE void mask(FragmentC &s, int filled, const int (&seen)[2], Vec<float, 2> bias, float unit = 1.0f,
                      Vec<float, 2> start = {0.0f, 0.0f}) const {
    const int key = 2 * (lane() % 4);
    const float factor[2] = {query_factor(first + lane() / 4) * unit, query_factor(first + lane() / 4 + 8) * unit};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool visible = key + r % 2 < min_of(filled, seen[r / 2]);
      s.r[r] = visible ? s.r[r] * factor[r / 2] + (start[r / 2] + bias[r % 2]) : -infinity();
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

// q . k of 8 + 8 tokens or entries of an unquantized block. `kept`: the first part of the queries; the rest is read
// again, since registers are scarce and these rows leave instructions to spare.
HW_DEVICE void half_logits(FragmentC (&s)[2], const FragmentA (&kept)[4], const WarpRows &rows, Shared<uint8_t> stage,
                           const StepKeys &keys) {
  const int g = lane() / 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) s[n] = FragmentC{{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
  for (int part = 0; part < CHANNEL_STEPS / 4; ++part) {
    FragmentA q[4] = {kept[0], kept[1], kept[2], kept[3]};
    if (part > 0) QueryRows::read_part(QueryRows{QUERY_ROWS}.pages(), rows.first, part, q);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t pairs[8];
      HalfRow<K_RUN>::read_pair(stage, keys.k_at[n] + g * PAGE_ROW_BYTES, g < keys.filled[n], part, pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) mma(s[n], q[i], FragmentB{{pairs[2 * i], pairs[2 * i + 1]}});
    }
  }
}

// Values of 8 + 8 page tokens, and out += p v.
HW_DEVICE void add_page_values(WarpRows &rows, const FragmentA &p, Shared<uint8_t> stage, const StepKeys &keys) {
  const int g = lane() / 4;
#pragma unroll
  for (int part = 0; part < LIST_PAIRS / 8; ++part) {  // a few registers at a time
    uint32_t low[8], high[8];
    HalfRow<V_RUN>::read_pair(stage, keys.v_at[0] + g * PAGE_ROW_BYTES, g < keys.filled[0], part, low);
    HalfRow<V_RUN>::read_pair(stage, keys.v_at[1] + g * PAGE_ROW_BYTES, g < keys.filled[1], part, high);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      mma(rows.out[8 * part + j], p, FragmentB{{transpose_8x8(low[j]), transpose_8x8(high[j])}});
    }
  }
}

// The two fp16 that begin at byte `at`; zeros for keys that are not filled. key: of the first.
HW_DEVICE uint32_t filled_pair(Shared<uint8_t> stage, int at, int key, int filled) {
  const uint32_t mask = (key < filled ? 0x0000ffffu : 0u) | (key + 1 < filled ? 0xffff0000u : 0u);
  return stage.load_as<uint32_t>(at) & mask;
}

// Logits of 8 + 8 entries of a quantized block, from entry `first` on -> weights, and out += p v of their codes.
HW_DEVICE void add_code_values(WarpRows &rows, const FragmentC (&s)[2], Shared<uint8_t> stage, int first,
                               const int (&filled)[2]) {
  const int g = lane() / 4, pair = 2 * (lane() % 4);
  uint32_t columns[2][LIST_PAIRS], scale[2], minimum[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const bool read = WHOLE_STEPS || filled[n] > 0;
    scale[n] = read ? filled_pair(stage, V_SCALE + 2 * (first + 8 * n + pair), pair, filled[n]) : 0;
    minimum[n] = read ? filled_pair(stage, V_MIN + 2 * (first + 8 * n + pair), pair, filled[n]) : 0;
  }
  const FragmentA p = rows.weigh_codes(s, scale, minimum);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t codes[V_ROW_BYTES / 16];
    Row<V_ROW_BYTES, false>::read(stage, V_CODES + (first + 8 * n + g) * V_ROW_BYTES, g < filled[n], codes);
    Codes<V_BITS, V_RUN, true>::unpack(codes, columns[n]);
  }
#pragma unroll
  for (int j = 0; j < LIST_PAIRS; ++j) mma_fp16(rows.out[j], p, FragmentB{{columns[0][j], columns[1][j]}});
}

// Queries of one quantized block: channels times their scale, and where logits start, q . minimum. Products with codes
// come out in units of KEY_UNIT. Low nibbles take 4 and high ones 1 / 4 of the scale, which makes their units one.
struct BlockQueries {
  static constexpr float KEY_UNIT = K_BITS == 4 ? 0x1p22f : 0x1p24f;
  FragmentA q[CHANNEL_STEPS];
  Vec<float, 2> start;  // of rows g and g + 8, in log2

  // Reads the plain ones anew: both do not fit the registers.
  HW_DEVICE void prepare(Shared<uint8_t> block, const WarpRows &rows) {
    QueryRows::read(QueryRows{QUERY_ROWS}.codes(), rows.first, q);
    ChannelField field;
    field.read(block, K_MIN);
    FragmentC least{{0.0f, 0.0f, 0.0f, 0.0f}};  // the same in all columns
    dot<true>(least, q, field.pairs);
#pragma unroll
    for (int i = 0; i < 2; ++i) start[i] = least.r[2 * i] * query_factor(rows.first + lane() / 4 + 8 * i);
    field.read(block, K_SCALE);
#pragma unroll
    for (int j = 0; j < LIST_PAIRS; ++j) {
      uint32_t scale = field.pairs[j];
      if (K_BITS == 4) scale = multiply2_fp16(scale, is_high(K_BITS, j) ? 0x34003400 : 0x44004400);
#pragma unroll
      for (int i = 0; i < 2; ++i) q[j / 2].r[2 * (j % 2) + i] = multiply2_fp16(q[j / 2].r[2 * (j % 2) + i], scale);
    }
  }
};

}  // namespace
