// Decode path of `attend` on AVX2, for head_dims of whole 64 channels and bf16 queries. Sixteen registers of eight
// floats are few, and turning codes into floats costs more instructions than multiplying them. So three query vectors
// share each row, bf16 rows are taken as pairs of channels (a shift gives the first, a mask the second), and INT8 and
// INT4 codes are multiplied as 16-bit integers, two products to an instruction, summed exactly:
//
// K: q . k = q . min + unit sum_d round(q_d scale_d / unit) code_d, unit = largest |q_d scale_d| / 32767, once a block.
// V: the same with weights in the place of q, once a tile; rows j and j + 1 are interleaved so that their two products
//    fall into one sum. At most WIDE_TILE * 255 * 32767 < 2^31.
#pragma once

#include "cpu_dot.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

constexpr int PAIR_CHANNELS = 2 * W;
constexpr float CODE_MAX = 32767.0f;

COMMITKV_INLINE __m256i load_bytes32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

// Channels [16 i, 16 i + 16) of a row of K as 16-bit codes.
template <int Format>
COMMITKV_INLINE __m256i key_codes(const uint8_t *row, int64_t i, int64_t dim) {
  const bool high = Format == I4 && i * 16 >= dim / 2;
  const __m128i *from = reinterpret_cast<const __m128i *>(row + i * 16 - (high ? dim / 2 : 0));
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from));
  if (Format == I8) return wide;
  return high ? _mm256_srli_epi16(wide, 4) : _mm256_and_si256(wide, _mm256_set1_epi16(15));
}

// The query vectors of an item as the kernels below want them.
struct NarrowRoom {
  float *pairs;              // [M, D] of every 16 channels the even ones, then the odd ones
  int16_t *codes;            // [M, D] query times the block's K scales, in units
  int16_t *weights;          // [M, 2 WIDE_TILE] in units; every run begins at an even place
  float *scale, *minimum;    // [D] of the block's K
  float unit[DOT_VECTORS];   // of `codes`, then of `weights`
  float start[DOT_VECTORS];  // q . min
  float added[DOT_VECTORS];  // weights . min
};

constexpr int64_t WEIGHT_STRIDE = 2 * WIDE_TILE;

// Keys, softmax and values of a tile wait for each other: large tiles wait less often. Rows of bf16 are bound by
// memory, which delivers more evenly to small ones.
constexpr Capacity NARROW_CAPACITY = {WIDE_TILE, 32};

// to[0, count) = round(from / unit), where the largest of `from` is CODE_MAX units. Up to a whole 16 both are touched
// beyond count.
COMMITKV_INLINE void to_units(const float *from, int64_t count, float unit, int16_t *to) {
  const vf by = set1(unit > 0.0f ? 1.0f / unit : 0.0f);
  for (int64_t i = 0; i < count; i += 2 * W) {
    const __m256i a = _mm256_cvtps_epi32(load(from + i) * by), b = _mm256_cvtps_epi32(load(from + i + W) * by);
    _mm256_storeu_si256((__m256i *)(to + i), _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8));
  }
}

// Lanes of the sum of `count` codes, which zeros follow up to a whole 16.
COMMITKV_INLINE vf sum_units(const int16_t *codes, int64_t count) {
  const __m256i one = _mm256_set1_epi16(1);
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; i += 2 * W) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(load_bytes32(codes + i), one));
  }
  return _mm256_cvtepi32_ps(sum);
}

static void pair_query(const Work &w, NarrowRoom &room) {
  for (int64_t m = 0; m < w.vectors; ++m) {
    const float *q = w.query + m * w.query_stride;
    float *to = room.pairs + m * w.dim;
    for (int64_t d = 0; d < w.dim; ++d)
      to[d / PAIR_CHANNELS * PAIR_CHANNELS + d % 2 * W + d % PAIR_CHANNELS / 2] = q[d];
  }
}

// Codes are spread about this one: what rounding took of what they are multiplied by is put back so many times.
template <int Format>
constexpr float MIDDLE = Format == I8 ? 127.5f : 7.5f;

// codes, unit and start of the block that `run` lies in.
template <int Format>
static void code_query(const Args &a, const Run &run, const Work &w, NarrowRoom &room) {
  widen_f16(halves(run.block, a.k_scale), w.dim, room.scale);
  widen_f16(halves(run.block, a.k_min), w.dim, room.minimum);
  float folded[DOT_VECTORS * 256];
  vf total[DOT_VECTORS];
  for (int64_t m = 0; m < w.vectors; ++m) {
    vf largest = set1(0.0f);
    total[m] = set1(0.0f);
    for (int64_t d = 0; d < w.dim; d += W) {
      const vf q = load(w.query + m * w.query_stride + d), x = q * load(room.scale + d);
      store(folded + m * w.dim + d, x);
      largest = vmax(largest, vmax(x, set1(0.0f) - x));
      total[m] = fma(q, load(room.minimum + d), fma(x, set1(MIDDLE<Format>), total[m]));
    }
    room.unit[m] = hmax(largest) / CODE_MAX;
  }
  for (int64_t m = 0; m < w.vectors; ++m) {
    int16_t *to = room.codes + m * w.dim;
    to_units(folded + m * w.dim, w.dim, room.unit[m], to);
    room.start[m] = hsum(fma(sum_units(to, w.dim), set1(-MIDDLE<Format> * room.unit[m]), total[m]));
  }
}

// The same vector, in a register and of unknown origin for all that the compiler knows. It would rather load it for
// each use, which is more loads than a core can do, and add integers in an order that wants more registers than it has.
template <typename T>
COMMITKV_INLINE T held(T x) {
  __asm__("" : "+x"(x));
  return x;
}

// `from`, of which the compiler knows nothing: what is read through it twice is loaded twice, and not kept for the
// second time on the stack.
COMMITKV_INLINE const int16_t *anew(const int16_t *from) {
  __asm__ volatile("" : "+r"(from));
  return from;
}

// Two rows of K with Heads query vectors: of each sum of products lanes that are still to be added together, rows side
// by side. Integers need more of the other instructions than of registers: four rows at once are slower.
template <int Format, int Heads>
COMMITKV_INLINE void dot_codes(const uint8_t *first, const uint8_t *second, const int16_t *query, int64_t dim,
                               __m256i *out) {
  query = anew(query);
  __m256i acc[Heads][2] = {};
#pragma GCC unroll 4
  for (int64_t i = 0; i < dim / 16; ++i) {
    const __m256i k = key_codes<Format>(first, i, dim), l = key_codes<Format>(second, i, dim);
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const __m256i q = held(load_bytes32(query + h * dim + i * 16));
      acc[h][0] = held(_mm256_add_epi32(acc[h][0], _mm256_madd_epi16(k, q)));
      acc[h][1] = held(_mm256_add_epi32(acc[h][1], _mm256_madd_epi16(l, q)));
    }
  }
  for (int h = 0; h < Heads; ++h) out[h] = _mm256_hadd_epi32(acc[h][0], acc[h][1]);
}

// Four rows of K with Heads query vectors: lanes that are still to be added together, as above. The rows share each
// part of the queries; their sums, the part and one row fill the registers.
template <int Heads>
COMMITKV_INLINE void dot_pairs(const uint8_t *const *rows, const float *query, int64_t dim, vf acc[4][Heads]) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < dim; i += PAIR_CHANNELS) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      vf q[Heads];
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) q[h] = held(load(query + h * dim + i + odd * W));
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const uint16_t *pairs = reinterpret_cast<const uint16_t *>(rows[t]) + i;
        const vf k = held(odd ? load_bf16_second(pairs) : load_bf16_first(pairs));
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) acc[t][h] = fma(k, q[h], acc[t][h]);
      }
    }
  }
}

// Logits of a run, four rows at a time (up to three beyond it are overwritten with copies of its last).
template <int Format, int Heads, int Dim>
static void narrow_run(const Run &run, const Run *next, const NarrowRoom &room, const Work &w, int64_t m) {
  const int64_t dim = Dim ? Dim : w.dim, row_bytes = code_row_bytes(Format, dim);
  const float *pairs = room.pairs + m * dim;
  const int16_t *codes = room.codes + m * dim;
  float *logits = w.logits + m * w.logit_stride + run.first;
  for (int32_t j = 0; j < run.count; j += 4, logits += 4) {
    const uint8_t *rows[4];
    for (int32_t t = 0; t < 4; ++t) rows[t] = run.k + (j + t < run.count ? j + t : run.count - 1) * row_bytes;
    if (next) prefetch(next->k + j * row_bytes, 4 * row_bytes);
    if (Format == BF16) {
      vf acc[4][Heads] = {};
      dot_pairs<Heads>(rows, pairs, dim, acc);
      for (int h = 0; h < Heads; ++h) {
        const vf sums = _mm256_hadd_ps(_mm256_hadd_ps(acc[0][h], acc[1][h]), _mm256_hadd_ps(acc[2][h], acc[3][h]));
        const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
        _mm_storeu_ps(logits + h * w.logit_stride, sum);
      }
    } else {
      __m256i upper[Heads], lower[Heads];
      dot_codes<Format, Heads>(rows[0], rows[1], codes, dim, upper);
      dot_codes<Format, Heads>(rows[2], rows[3], codes, dim, lower);
      for (int h = 0; h < Heads; ++h) {
        const __m256i sums = _mm256_hadd_epi32(upper[h], lower[h]);
        const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        const __m128 unit = _mm_set1_ps(room.unit[m + h]), start = _mm_set1_ps(room.start[m + h]);
        _mm_storeu_ps(logits + h * w.logit_stride, _mm_fmadd_ps(_mm_cvtepi32_ps(sum), unit, start));
      }
    }
  }
}

template <int Format, int Heads>
static void narrow_run_of(const Run &run, const Run *next, const NarrowRoom &room, const Work &w, int64_t m) {
  (w.dim == 64 ? narrow_run<Format, Heads, 64> : narrow_run<Format, Heads, 0>)(run, next, room, w, m);
}

// sums = sums * factor + added + more, over eight channels.
COMMITKV_INLINE void add_to_sums(const Work &w, int64_t m, int64_t channel, float added, vf more) {
  float *sums = w.sums + m * w.query_stride + channel;
  store(sums, fma(load(sums), set1(w.factors[m]), set1(added)) + more);
}

// Half of 32 bytes of every row of V, as codes of the channels from `channel` on: for INT4 the High or the low halves.
// The sums of all 32 do not fit the registers.
template <int Format, bool High, int Heads, int Half>
static void weigh_codes(const Tile &tile, const Tile *next, int64_t at, int64_t channel, const Work &w,
                        const NarrowRoom &room, int64_t m) {
  const int64_t row_bytes = code_row_bytes(Format, w.dim);
  const __m256i zero = _mm256_setzero_si256(), low = _mm256_set1_epi8(15);
  __m256i acc[Heads][2] = {};
  const int16_t *weights = room.weights + m * WEIGHT_STRIDE;
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    const bool ahead = next && r < next->num_runs;
    for (int32_t j = 0; j < run.count; j += 2, weights += 2) {
      const uint8_t *row = run.v + j * row_bytes + at;
      if (ahead) __builtin_prefetch(next->runs[r].v + j * row_bytes + at * 2, 0, 2);
      const __m256i a = load_bytes32(row), b = load_bytes32(j + 1 < run.count ? row + row_bytes : row);
      __m256i mixed = Half ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b);
      if (Format == I4) mixed = _mm256_and_si256(High ? _mm256_srli_epi16(mixed, 4) : mixed, low);
      const __m256i first = _mm256_unpacklo_epi8(mixed, zero), second = _mm256_unpackhi_epi8(mixed, zero);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) {
        int32_t pair;
        std::memcpy(&pair, weights + h * WEIGHT_STRIDE, 4);
        const __m256i weight = _mm256_set1_epi32(pair);
        acc[h][0] = _mm256_add_epi32(acc[h][0], _mm256_madd_epi16(first, weight));
        acc[h][1] = _mm256_add_epi32(acc[h][1], _mm256_madd_epi16(second, weight));
      }
    }
  }
  // Lane halves hold four channels from 8 Half and 16 + 8 Half on, and the four after them.
  for (int h = 0; h < Heads; ++h) {
    const vf unit = set1(room.unit[m + h]);
    const __m256i x = _mm256_permute2x128_si256(acc[h][0], acc[h][1], 0x20),
                  y = _mm256_permute2x128_si256(acc[h][0], acc[h][1], 0x31);
    add_to_sums(w, m + h, channel + Half * W, room.added[m + h], _mm256_cvtepi32_ps(x) * unit);
    add_to_sums(w, m + h, channel + (2 + Half) * W, room.added[m + h], _mm256_cvtepi32_ps(y) * unit);
  }
}

// Channels [channel, channel + 32) of bf16 rows of V.
template <int Heads>
static void weigh_pairs(const Tile &tile, const Tile *next, int64_t channel, const Work &w, int64_t m) {
  vf acc[Heads][4];
  for (auto &head : acc)
    for (vf &sum : head) sum = set1(0.0f);
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    const bool ahead = next && r < next->num_runs;
    const float *weights = w.logits + m * w.logit_stride + run.first;
    for (int32_t j = 0; j < run.count; ++j) {
      const uint16_t *row = reinterpret_cast<const uint16_t *>(run.v) + j * w.dim + channel;
      if (ahead) __builtin_prefetch(next->runs[r].v + (j * w.dim + channel) * 2, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint16_t *from = row + i / 2 * PAIR_CHANNELS;
        const vf v = i % 2 ? load_bf16_second(from) : load_bf16_first(from);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) acc[h][i] = fma(set1(weights[h * w.logit_stride + j]), v, acc[h][i]);
      }
    }
  }
  for (int h = 0; h < Heads; ++h) {
    for (int i = 0; i < 4; i += 2) {
      const vf lower = _mm256_unpacklo_ps(acc[h][i], acc[h][i + 1]),
               upper = _mm256_unpackhi_ps(acc[h][i], acc[h][i + 1]);
      add_to_sums(w, m + h, channel + i * W, 0.0f, _mm256_permute2f128_ps(lower, upper, 0x20));
      add_to_sums(w, m + h, channel + i * W + W, 0.0f, _mm256_permute2f128_ps(lower, upper, 0x31));
    }
  }
}

// Weights of the tile as 16-bit codes, each run's first at an even place and, where a run is odd, a zero after it. What
// a run writes beyond its end is the next one's place.
template <int Format>
static void code_weights(const Args &a, const Tile &tile, const Work &w, NarrowRoom &room) {
  float largest[DOT_VECTORS];
  fold_weights(a, tile, w, MIDDLE<Format>, room.added, largest);
  for (int64_t m = 0; m < w.vectors; ++m) {
    float *weights = w.logits + m * w.logit_stride;
    for (int64_t j = tile.tokens; j % (2 * W); ++j) weights[j] = 0.0f;
    int16_t *const first = room.weights + m * WEIGHT_STRIDE, *to = first;
    room.unit[m] = largest[m] / CODE_MAX;
    for (int32_t r = 0; r < tile.num_runs; ++r) {
      const Run &run = tile.runs[r];
      to_units(weights + run.first, run.count, room.unit[m], to);
      if (run.count % 2) to[run.count] = 0;
      to += run.count + run.count % 2;
    }
    _mm256_storeu_si256((__m256i *)to, _mm256_setzero_si256());
    room.added[m] -= MIDDLE<Format> * room.unit[m] * hsum(sum_units(first, to - first));
  }
}

template <int Format, int Heads>
static void weigh_narrow(const Tile &tile, const Tile &next, const Work &w, const NarrowRoom &room, int64_t m) {
  const int64_t bytes = code_row_bytes(Format, w.dim);
  if (Format == BF16) {
    for (int64_t d = 0; d < w.dim; d += 32) weigh_pairs<Heads>(tile, m == 0 ? &next : nullptr, d, w, m);
    return;
  }
  for (int64_t at = 0; at < bytes; at += 32) {
    weigh_codes<Format, false, Heads, 0>(tile, m == 0 ? &next : nullptr, at, at, w, room, m);
    weigh_codes<Format, false, Heads, 1>(tile, nullptr, at, at, w, room, m);
    if (Format != I4) continue;
    weigh_codes<Format, true, Heads, 0>(tile, nullptr, at, w.dim / 2 + at, w, room, m);
    weigh_codes<Format, true, Heads, 1>(tile, nullptr, at, w.dim / 2 + at, w, room, m);
  }
}

// Query vectors that are taken together when `rest` are left: three, and rather two and two than three and one.
COMMITKV_INLINE int heads_of(int64_t rest) { return rest == 1 ? 1 : rest == 2 || rest == 4 ? 2 : 3; }

template <int Format>
static void narrow_keys(const Args &a, const Tile &tile, const Tile &next, const Work &w, NarrowRoom &room) {
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    if (quantized(Format)) code_query<Format>(a, run, w, room);
    for (int64_t m = 0; m < w.vectors;) {
      const Run *ahead = m == 0 && r < next.num_runs ? next.runs + r : nullptr;
      const int heads = heads_of(w.vectors - m);
      (heads == 1   ? narrow_run_of<Format, 1>
       : heads == 2 ? narrow_run_of<Format, 2>
                    : narrow_run_of<Format, 3>)(run, ahead, room, w, m);
      m += heads;
    }
  }
}

template <int Format>
static void narrow_values(const Args &a, const Tile &tile, const Tile &next, const Work &w, NarrowRoom &room) {
  if (quantized(Format)) code_weights<Format>(a, tile, w, room);
  for (int64_t m = 0; m < w.vectors;) {
    const int heads = heads_of(w.vectors - m);
    (heads == 1   ? weigh_narrow<Format, 1>
     : heads == 2 ? weigh_narrow<Format, 2>
                  : weigh_narrow<Format, 3>)(tile, next, w, room, m);
    m += heads;
  }
}

// Whether the formats are ones that this path reads.
COMMITKV_INLINE bool narrow_takes(int32_t format) { return format == BF16 || quantized(format); }

static void narrow_tile(const Plan &plan, const Item &item, const List &list, const Tile &tile, const Tile &next,
                        Work &w, NarrowRoom &room) {
  const Args &a = plan.args;
  switch (k_format(a, tile)) {
    case BF16: narrow_keys<BF16>(a, tile, next, w, room); break;
    case I8: narrow_keys<I8>(a, tile, next, w, room); break;
    default: narrow_keys<I4>(a, tile, next, w, room); break;
  }
  finish_logits(plan, item, list, tile, w);
  running_softmax(tile, w);
  switch (v_format(a, tile)) {
    case BF16: narrow_values<BF16>(a, tile, next, w, room); break;
    case I8: narrow_values<I8>(a, tile, next, w, room); break;
    default: narrow_values<I4>(a, tile, next, w, room); break;
  }
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
