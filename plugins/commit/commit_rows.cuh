// Rows of K and V on their way in and out: addresses of sources, copies into shared memory, channels of a lane, codes.
// Codes are those of plugins/blocks.py: scale and minimum are rounded to fp16 before codes are computed from them.
#pragma once

#include "commit/commit_params.cuh"

namespace commit {

// ---- copies

// A run of global memory that becomes one row of shared memory; bytes 0: nothing.
struct RowCopy {
  const uint8_t *from;
  int bytes;
};

HW_DEVICE RowCopy key_copy(const Row &row, int source) {
  if (source < 0) return {row.old_block(block_of(source)) + K_CODES + entry_of(source) * K_ROW, K_ROW};
  return {reinterpret_cast<const uint8_t *>(token_row(row, load(row.p.staged + source), 0)), HALF_ROW};
}

HW_DEVICE RowCopy value_copy(const Row &row, int source) {
  if (source < 0) return {row.old_block(block_of(source)) + V_CODES + entry_of(source) * V_ROW, V_ROW};
  return {reinterpret_cast<const uint8_t *>(token_row(row, load(row.p.staged + source), 1)), HALF_ROW};
}

// One warp, between copy_begin and copy_end: lane i < count copies its row to row i of `to`. Whole rows that follow
// each other in memory (a run of slots of a page) go in one copy.
HW_DEVICE void copy_rows(Barriers bars, int barrier, Shared<uint8_t> to, RowCopy mine, int count) {
  const uint64_t address = reinterpret_cast<uint64_t>(mine.from);
  const uint64_t before = shuffle(address, lane() > 0 ? lane() - 1 : 0);
  const int bytes_before = shuffle(mine.bytes, lane() > 0 ? lane() - 1 : 0);
  const bool joins = lane() > 0 && mine.bytes == HALF_ROW && bytes_before == HALF_ROW && address == before + HALF_ROW;
  const uint32_t joined = hw::ballot(joins);
  for (int first = 0; first < count;) {
    int last = first + 1;
    while (last < count && (joined >> last & 1u) != 0) ++last;
    const uint64_t from = shuffle(address, first);
    const int bytes = shuffle(mine.bytes, first) + (last - first - 1) * HALF_ROW;
    if (bytes > 0) {
      copy(bars, barrier, to.at(first * HALF_ROW, bytes), reinterpret_cast<const void *>(from), bytes);
    }
    first = last;
  }
}

// ---- channels of a lane

struct Channels {
  float x[CHANNELS];  // PAIRS of the lower half of a row, then PAIRS of the upper
};

HW_DEVICE int channel(int i) { return (i < PAIRS ? 0 : HEAD_DIM / 2 - PAIRS) + lane() * PAIRS + i; }

// T: Half or Fp16; `at`: byte where the row begins.
template <typename T>
HW_DEVICE Channels read_values(Shared<uint8_t> from, int at) {
  Channels c;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const Vec<T, PAIRS> x = from.load_as<Vec<T, PAIRS>>(at + 2 * channel(part * PAIRS));
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) c.x[part * PAIRS + j] = to_float(x[j]);
  }
  return c;
}

template <typename T>
HW_DEVICE void write_values(Shared<uint8_t> to, int at, const Channels &c) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    Vec<T, PAIRS> x;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) x[j] = from_float<T>(c.x[part * PAIRS + j]);
    to.store_as(at + 2 * channel(part * PAIRS), x);
  }
}

template <int BITS>
HW_DEVICE Channels read_codes(Shared<uint8_t> from, int at) {
  using Bytes = Vec<uint8_t, PAIRS>;
  Channels c;
  if constexpr (BITS == 16) {
    c = read_values<Half>(from, at);
  } else if constexpr (BITS == 8) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const Bytes x = from.load_as<Bytes>(at + channel(part * PAIRS));
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) c.x[part * PAIRS + j] = static_cast<float>(x[j]);
    }
  } else {
    const Bytes x = from.load_as<Bytes>(at + channel(0));
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      c.x[j] = static_cast<float>(x[j] & 15);
      c.x[PAIRS + j] = static_cast<float>(x[j] >> 4);
    }
  }
  return c;
}

// Where codes go: shared memory or a block that stays.
struct SharedBytes {
  Shared<uint8_t> to;
  template <typename U>
  HW_DEVICE void put(int at, U x) const {
    to.store_as(at, x);
  }
};

struct GlobalBytes {
  uint8_t *to;
  template <typename U>
  HW_DEVICE void put(int at, U x) const {
    store(reinterpret_cast<U *>(to + at), x);
  }
};

template <int BITS>
struct CodeElement {
  using Type = uint8_t;
};
template <>
struct CodeElement<16> {
  using Type = Half;
};

// Writes the lane's channels of one row: whole numbers, or the values themselves if BITS is 16.
template <int BITS, typename Bytes>
HW_DEVICE void write_codes(const Bytes &to, int at, const Channels &c) {
  if constexpr (BITS == 4) {
    Vec<uint8_t, PAIRS> x;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      x[j] = static_cast<uint8_t>(static_cast<int>(c.x[j]) | static_cast<int>(c.x[PAIRS + j]) << 4);
    }
    to.put(at + channel(0), x);
  } else {
    using T = typename CodeElement<BITS>::Type;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Vec<T, PAIRS> x;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        if constexpr (BITS == 8) {
          x[j] = static_cast<uint8_t>(static_cast<int>(c.x[part * PAIRS + j]));
        } else {
          x[j] = from_float<Half>(c.x[part * PAIRS + j]);
        }
      }
      to.put(at + static_cast<int>(sizeof(T)) * channel(part * PAIRS), x);
    }
  }
}

// ---- scales

struct Scale {
  Fp16 scale, minimum;
};

HW_DEVICE float clamp(float x, float low, float high) { return min_of(max_of(x, low), high); }

// fp16 minimum and scale whose codes 0 .. 2^BITS - 1 span [low, high].
template <int BITS>
HW_DEVICE Scale scale_of(float low, float high) {
  Scale s;
  s.minimum = from_float<Fp16>(clamp(low, -FP16_MAX, FP16_MAX));
  s.scale = from_float<Fp16>(clamp((high - to_float(s.minimum)) / ((1 << BITS) - 1), 0.0f, FP16_MAX));
  return s;
}

// Nearest whole number, ties to even, of 0 <= x < 2^22.
HW_DEVICE float round_even(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: its last mantissa bit counts ones
  return (x + magic) - magic;
}

// A division and not a product with the inverse: keys of few bits often lie exactly between two codes.
template <int BITS>
HW_DEVICE float code_of(float x, float scale, float minimum) {
  if (!(scale > 0.0f)) return 0.0f;
  return round_even(clamp((x - minimum) / scale, 0.0f, static_cast<float>((1 << BITS) - 1)));
}

}  // namespace commit
