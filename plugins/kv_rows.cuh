// How a warp reads rows of keys, values and queries as tensor-core operands. Included after kv_tiles.cuh.
//
// OPERANDS. Copies are linear, so rows lie unswizzled, a power of two of bytes apart. Two freedoms make that cheap:
//   q.k: the order in which a product runs over channels is free, if Q has the same. Lane (g, t) = (lane / 4, lane % 4)
//     takes of row g the channels  p * 4R + t * R + [0, R),  p = 0, 1, ...  (R = 8 or 16: 16 bytes of what is stored),
//     as vectors: its "list" of HEAD_DIM / 4 channels. Step s of the product takes channels 4s .. 4s + 3 of each list.
//   p.v: the value operand needs two keys of one channel in a register, while a row holds two channels of one key.
//     Rows are read as above, and each register goes through `transpose_8x8`, codes still packed: one transposes 128
//     bytes, whatever they hold. Column 2t + i of output tile j is then channel 2j + i of lane t's list.
// A quarter warp reads rows g and g + 1; where both begin at bank 0, odd rows take the vectors of a pair in the other
// order, which makes the 8 vectors of the quarter lie in different banks.
//
// CODES. A byte b below 0x64 is the fp16 1024 + b, one whose upper nibble is n is 1024 + 16 n; one exact fma gives
// the code, a second one, rounded once, min + scale * code. Codes are multiplied as fp16 whatever ELEMENT is: scales
// are fp16, and bf16 would lose 3 of their bits. Queries are scaled by a power of two for that, so that they fit fp16
// (`QueryRows`).
#pragma once

#include "kv_tiles.cuh"

namespace {

constexpr int LIST_PAIRS = HEAD_DIM / 8;  // registers of two channels that hold a lane's list
constexpr int CHANNEL_STEPS = HEAD_DIM / 16;

// R of a lane's list, for keys and for values.
constexpr int run_of(int bits) { return bits == 8 || (bits == 4 && HEAD_DIM == 128) ? 16 : 8; }
constexpr int K_RUN = run_of(K_BITS);
constexpr int V_RUN = run_of(V_BITS);

// ---- rows as operands

// One lane's part of a stored row of ROW_BYTES, registers in the order of its list; zeros where the row is not filled.
// PAIRED: two neighbouring vectors belong to one run of the list (16-bit channels, R = 16).
template <int ROW_BYTES, bool PAIRED>
struct Row {
  static constexpr int VECTORS = ROW_BYTES / 64;
  static constexpr int WORDS = ROW_BYTES / 16;

  HW_DEVICE static void read(Shared<uint8_t> from, int row_at, bool filled, uint32_t (&words)[WORDS]) {
    const int t = lane() % 4;
    if constexpr (VECTORS == 0) {
      Vec<uint32_t, 2> x{0, 0};
      if (filled) x = from.load_as<Vec<uint32_t, 2>>(row_at + 8 * t);
      words[0] = x[0], words[1] = x[1];
    } else {
      const int flip = VECTORS > 1 ? lane() / 4 & 1 : 0;
      Vec<uint32_t, 4> x[VECTORS];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int from_v = v ^ flip, chunk = PAIRED ? 8 * (from_v / 2) + 2 * t + from_v % 2 : 4 * from_v + t;
        x[v] = Vec<uint32_t, 4>{0, 0, 0, 0};
        if (filled) x[v] = from.load_as<Vec<uint32_t, 4>>(row_at + 16 * chunk);
      }
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        words[w] = VECTORS == 1 ? x[0][w] : flip ? x[(w / 4 ^ 1) % VECTORS][w % 4] : x[w / 4][w % 4];
      }
    }
  }
};

template <int RUN>
using HalfRow = Row<HEAD_DIM * 2, RUN == 16>;

// Codes of two channels or two keys as fp16, exactly. `low`: bits of 1024 + code in each half.
constexpr uint32_t ONE_K = 0x64006400, BYTES_64 = 0x64646464;
HW_DEVICE uint32_t code_of(uint32_t low) { return fma2_fp16(low, 0x3c003c00, 0xe400e400); }         // x - 1024
HW_DEVICE uint32_t high_code_of(uint32_t high) { return fma2_fp16(high, 0x2c002c00, 0xd400d400); }  // x / 16 - 64
// Bytes 0, 2, 1, 3: neighbours then lie two bytes apart, where both halves of a register expect them.
HW_DEVICE uint32_t part_neighbours(uint32_t codes) { return byte_perm(codes, 0, 0x3120); }

// A lane's code words of one key's row -> fp16 pairs of its list.
template <int BITS, int RUN>
struct KeyCodes {
  static constexpr int WORDS = HEAD_DIM * BITS / 8 / 16;

  HW_DEVICE static void unpack(const uint32_t (&codes)[WORDS], uint32_t (&pairs)[LIST_PAIRS]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      if constexpr (BITS == 8) {
        pairs[2 * w] = code_of(byte_perm(codes[w], BYTES_64, 0x4140));
        pairs[2 * w + 1] = code_of(byte_perm(codes[w], BYTES_64, 0x4342));
      } else if constexpr (BITS == 4) {
        const uint32_t x = part_neighbours(codes[w]), y = x >> 8;
        pairs[2 * w] = code_of((x & 0x000f000f) | ONE_K);
        pairs[2 * w + 1] = code_of((y & 0x000f000f) | ONE_K);
        pairs[RUN / 2 + 2 * w] = high_code_of((x & 0x00f000f0) | ONE_K);
        pairs[RUN / 2 + 2 * w + 1] = high_code_of((y & 0x00f000f0) | ONE_K);
      }
    }
  }
};

// A lane's code words of one key's value row -> of 8 keys, per output tile j, the codes of keys (2t, 2t + 1) in column
// g. Collective: lane (g, t) brings the row of key g.
template <int BITS, int RUN>
struct ValueCodes {
  static constexpr int WORDS = HEAD_DIM * BITS / 8 / 16;

  HW_DEVICE static void unpack(const uint32_t (&codes)[WORDS], uint32_t (&columns)[LIST_PAIRS]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const uint32_t x = transpose_8x8(part_neighbours(codes[w])), y = x >> 8;
      if constexpr (BITS == 8) {
        columns[2 * w] = code_of(byte_perm(x, BYTES_64, 0x4240));
        columns[2 * w + 1] = code_of(byte_perm(x, BYTES_64, 0x4341));
      } else if constexpr (BITS == 4) {
        columns[2 * w] = code_of((x & 0x000f000f) | ONE_K);
        columns[2 * w + 1] = code_of((y & 0x000f000f) | ONE_K);
        columns[RUN / 2 + 2 * w] = high_code_of((x & 0x00f000f0) | ONE_K);
        columns[RUN / 2 + 2 * w + 1] = high_code_of((y & 0x00f000f0) | ONE_K);
      }
    }
  }
};

// fp16 fields of the channels of a lane's list, of one quantized block: `at` is K_SCALE or K_MIN.
struct ChannelField {
  uint32_t pairs[LIST_PAIRS];

  HW_DEVICE void read(Shared<uint8_t> block, int at) {
    if constexpr (QUANTIZED) HalfRow<K_RUN>::read(block, at, true, pairs);
  }
};

// Keys of 8 tokens of a page as the second operand: the register pair of step s is pairs[2s], pairs[2s + 1].
HW_DEVICE void page_keys(Shared<uint8_t> stage, int first_at, int filled, uint32_t (&pairs)[LIST_PAIRS]) {
  const int g = lane() / 4;
  HalfRow<K_RUN>::read(stage, first_at + g * PAGE_ROW_BYTES, g < filled, pairs);
}

// The same of 8 entries of a block; fp16 if the block is quantized: codes times scale, plus minimum.
HW_DEVICE void block_keys(Shared<uint8_t> stage, int first, int filled, const ChannelField &scale,
                          const ChannelField &minimum, uint32_t (&pairs)[LIST_PAIRS]) {
  const int g = lane() / 4, row_at = K_CODES + (first + g) * K_ROW_BYTES;
  if constexpr (QUANTIZED) {
    uint32_t codes[K_ROW_BYTES / 16];
    Row<K_ROW_BYTES, false>::read(stage, row_at, g < filled, codes);
    KeyCodes<K_BITS, K_RUN>::unpack(codes, pairs);
#pragma unroll
    for (int j = 0; j < LIST_PAIRS; ++j) pairs[j] = fma2_fp16(pairs[j], scale.pairs[j], minimum.pairs[j]);
  } else {
    HalfRow<K_RUN>::read(stage, row_at, g < filled, pairs);
  }
}

// A block ends with a step: fields of unfilled entries may be read.
constexpr bool WHOLE_STEPS = BLOCK_ENTRIES % STEP_KEYS == 0;

// Logits of entries get their bias: of keys (2t, 2t + 1) of 8 entries, in units of log2.
HW_DEVICE Vec<float, 2> block_bias(Shared<uint8_t> stage, int first) {
  const Vec<Fp16, 2> bias = stage.load_as<Vec<Fp16, 2>>(BIAS + 2 * (first + 2 * (lane() % 4)));
  return {to_float(bias[0]) * LOG2E, to_float(bias[1]) * LOG2E};
}

// ---- queries

// Query rows in shared memory, [rows][HEAD_DIM]: row m of a tile is query head m % group of its row m / group. Each row
// is scaled by the power of two that brings its largest element under 1, which is exact; `factor` takes it back.
struct QueryRows {
  int num_rows;

  HW_DEVICE Shared<uint8_t> pages() const { return shared<uint8_t>(QUERY_AT, num_rows * PAGE_ROW_BYTES); }
  // For quantized blocks: fp16.
  HW_DEVICE Shared<uint8_t> codes() const { return shared<uint8_t>(QUERY_CODES_AT, num_rows * PAGE_ROW_BYTES); }
  HW_DEVICE Shared<float> factor() const { return shared<float>(FACTORS_AT, num_rows); }

  // One warp writes row m, `from` in global memory or null for a row of zeros. logit = factor * (q . k), in log2.
  HW_DEVICE void write(int m, const Half *from, float scale) const {
    constexpr int PAIRS = HEAD_DIM / 64;
    using Pairs = Vec<uint32_t, PAIRS>;
    float x[2 * PAIRS], top = 0.0f;
    Pairs raw = from ? load(reinterpret_cast<const Pairs *>(from) + lane()) : Pairs{};
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const Vec<float, 2> pair = unpack2(raw[i]);
      x[2 * i] = pair[0], x[2 * i + 1] = pair[1];
      top = max_of(top, max_of(max_of(pair[0], -pair[0]), max_of(pair[1], -pair[1])));
    }
#pragma unroll
    for (int n = 1; n < 32; n *= 2) top = max_of(top, shuffle_xor(top, n));
    // 2^e > top >= 2^(e - 1), from the bits of fp32.
    const int exponent = min_of(static_cast<int>(bit_cast<uint32_t>(top) >> 23) + 1, 253);
    const float shrink = bit_cast<float>(static_cast<uint32_t>(254 - exponent) << 23);
    Pairs scaled, codes;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      scaled[i] = pack2(x[2 * i] * shrink, x[2 * i + 1] * shrink);
      codes[i] = pack2_fp16(x[2 * i] * shrink, x[2 * i + 1] * shrink);
    }
    const int at = m * PAGE_ROW_BYTES + lane() * static_cast<int>(sizeof(Pairs));
    pages().store_as(at, scaled);
    if (QUERY_CODES_AT != QUERY_AT) this->codes().store_as(at, codes);
    if (lane() == 0) factor().store(m, scale * LOG2E * bit_cast<float>(static_cast<uint32_t>(exponent) << 23));
  }

  // The first operand of 16 rows from `first` on, step by step over the list.
  HW_DEVICE static void read(Shared<uint8_t> rows, int first, FragmentA (&q)[CHANNEL_STEPS]) {
    const int g = lane() / 4;
    uint32_t low[LIST_PAIRS], high[LIST_PAIRS];
    HalfRow<K_RUN>::read(rows, (first + g) * PAGE_ROW_BYTES, true, low);
    HalfRow<K_RUN>::read(rows, (first + g + 8) * PAGE_ROW_BYTES, true, high);
#pragma unroll
    for (int s = 0; s < CHANNEL_STEPS; ++s) {
      q[s] = FragmentA{{low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]}};
    }
  }
};

// c += q . k for 16 rows and 8 keys, channel by channel of the lists. FP16: operands are fp16 whatever ELEMENT is.
template <bool FP16>
HW_DEVICE void dot(FragmentC &c, const FragmentA (&q)[CHANNEL_STEPS], const uint32_t (&pairs)[LIST_PAIRS]) {
#pragma unroll
  for (int s = 0; s < CHANNEL_STEPS; ++s) {
    const FragmentB b{{pairs[2 * s], pairs[2 * s + 1]}};
    if constexpr (FP16) {
      mma_fp16(c, q[s], b);
    } else {
      mma(c, q[s], b);
    }
  }
}

}  // namespace
