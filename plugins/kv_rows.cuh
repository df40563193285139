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
// CODES. A code c in the low bits of an fp16 is the subnormal c * 2^-24, a nibble one place higher c * 2^-20: tensor
// cores multiply those exactly, and a mask is all that unpacking takes. `attend` does that: scales of keys go into the
// queries of a block, those of values into the weights, powers of two into what fp32 factors are there anyway. `score`,
// which passes many rows over the same keys, dequantizes them: under 0x64 a byte c is the fp16 1024 + c; one exact fma
// gives c, a second one min + scale * c. Codes are multiplied as fp16 whatever ELEMENT is: scales are fp16, and bf16
// would lose 3 of their bits. Queries are scaled by a power of two for that, so that they fit fp16 (`QueryRows`).
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
    if constexpr (VECTORS == 0) {
      Vec<uint32_t, 2> x{0, 0};
      if (filled) x = from.load_as<Vec<uint32_t, 2>>(row_at + 8 * (lane() % 4));
      words[0] = x[0], words[1] = x[1];
    } else if constexpr (VECTORS == 1) {
      const Vec<uint32_t, 4> x = vector(from, row_at, filled, lane() % 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = x[w];
    } else {
#pragma unroll
      for (int pair = 0; pair < VECTORS / 2; ++pair) {
        uint32_t part[8];
        read_pair(from, row_at, filled, pair, part);
#pragma unroll
        for (int w = 0; w < 8; ++w) words[8 * pair + w] = part[w];
      }
    }
  }

  // Vectors 2 * pair and 2 * pair + 1.
  HW_DEVICE static void read_pair(Shared<uint8_t> from, int row_at, bool filled, int pair, uint32_t (&words)[8]) {
    const int t = lane() % 4, flip = lane() / 4 & 1;
    const int first = PAIRED ? 8 * pair + 2 * t : 8 * pair + t, step = PAIRED ? 1 : 4;
    const Vec<uint32_t, 4> x = vector(from, row_at, filled, first + step * flip);
    const Vec<uint32_t, 4> y = vector(from, row_at, filled, first + step * (1 - flip));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = flip ? y[w] : x[w];
      words[4 + w] = flip ? x[w] : y[w];
    }
  }

 private:
  HW_DEVICE static Vec<uint32_t, 4> vector(Shared<uint8_t> from, int row_at, bool filled, int chunk) {
    Vec<uint32_t, 4> x{0, 0, 0, 0};
    if (filled) x = from.load_as<Vec<uint32_t, 4>>(row_at + 16 * chunk);
    return x;
  }
};

template <int RUN>
using HalfRow = Row<HEAD_DIM * 2, RUN == 16>;

constexpr uint32_t MINUS_ZERO = 0x80008000;  // of a pair of fp16: adds nothing
HW_DEVICE uint32_t multiply2_fp16(uint32_t a, uint32_t b) { return fma2_fp16(a, b, MINUS_ZERO); }

// Bytes 0, 2, 1, 3: neighbours then lie two bytes apart, where both halves of a register expect them.
HW_DEVICE uint32_t part_neighbours(uint32_t codes) { return byte_perm(codes, 0, 0x3120); }

// A lane's code words of one row -> pairs of its list, as subnormals: c * 2^-24, and c * 2^-20 in the second half of
// 4-bit lists (high nibbles).
// TRANSPOSED: of 8 keys' value rows, lane (g, t) bringing that of key g; gives per output tile j the codes of keys
// (2t, 2t + 1) in column g.
template <int BITS, int RUN, bool TRANSPOSED>
struct Codes {
  static constexpr int WORDS = HEAD_DIM * BITS / 8 / 16;

  HW_DEVICE static void unpack(const uint32_t (&codes)[WORDS], uint32_t (&pairs)[LIST_PAIRS]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      uint32_t x = part_neighbours(codes[w]);
      if constexpr (TRANSPOSED) x = transpose_8x8(x);
      const uint32_t y = x >> 8;
      if constexpr (BITS == 8) {
        pairs[2 * w] = x & 0x00ff00ff;
        pairs[2 * w + 1] = y & 0x00ff00ff;
      } else if constexpr (BITS == 4) {
        pairs[2 * w] = x & 0x000f000f;
        pairs[2 * w + 1] = y & 0x000f000f;
        pairs[RUN / 2 + 2 * w] = x & 0x00f000f0;
        pairs[RUN / 2 + 2 * w + 1] = y & 0x00f000f0;
      }
    }
  }
};
// Whether pair or output tile j of a list holds high nibbles.
constexpr bool is_high(int bits, int j) { return bits == 4 && j >= LIST_PAIRS / 2; }

// The code of such a pair itself.
HW_DEVICE uint32_t code_of(uint32_t pair, bool high) {
  const uint32_t above = pair | 0x64006400;                // 1024 + c, or 1024 + 16 c
  return high ? fma2_fp16(above, 0x2c002c00, 0xd400d400)   // above / 16 - 64
              : fma2_fp16(above, 0x3c003c00, 0xe400e400);  // above - 1024
}

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

// The same of 8 entries of a block; of a quantized one subnormal codes.
HW_DEVICE void block_keys(Shared<uint8_t> stage, int first, int filled, uint32_t (&pairs)[LIST_PAIRS]) {
  const int g = lane() / 4, row_at = K_CODES + (first + g) * K_ROW_BYTES;
  if constexpr (QUANTIZED) {
    uint32_t codes[K_ROW_BYTES / 16];
    Row<K_ROW_BYTES, false>::read(stage, row_at, g < filled, codes);
    Codes<K_BITS, K_RUN, false>::unpack(codes, pairs);
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

  // The first operand of 16 rows from `first` on: steps 4 * part .. 4 * part + 3 of the list, or all.
  HW_DEVICE static void read_part(Shared<uint8_t> rows, int first, int part, FragmentA (&q)[4]) {
    const int g = lane() / 4;
    uint32_t low[8], high[8];
    HalfRow<K_RUN>::read_pair(rows, (first + g) * PAGE_ROW_BYTES, true, part, low);
    HalfRow<K_RUN>::read_pair(rows, (first + g + 8) * PAGE_ROW_BYTES, true, part, high);
#pragma unroll
    for (int s = 0; s < 4; ++s) q[s] = FragmentA{{low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]}};
  }
  HW_DEVICE static void read(Shared<uint8_t> rows, int first, FragmentA (&q)[CHANNEL_STEPS]) {
#pragma unroll
    for (int part = 0; part < CHANNEL_STEPS / 4; ++part) {
      FragmentA of_part[4];
      read_part(rows, first, part, of_part);
#pragma unroll
      for (int s = 0; s < 4; ++s) q[4 * part + s] = of_part[s];
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
