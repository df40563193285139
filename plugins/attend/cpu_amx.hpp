// `attend` on AMX tiles (bf16 products, fp32 sums) for bf16 queries over bf16 pages and bf16/8-bit/4-bit blocks.
//
// Exact enough for fp32: codes 0..255 are exact in bf16; whatever is not (the folded query q_d scale_d, the weights)
// is split into a bf16 head and a bf16 rest, which leaves a relative error of 2^-16.
//   logits^T [16 tokens, 16 vectors] = K rows, straight from the page, times query pairs
//   sums [16 vectors, 16 channels]  += weights [16 vectors, 32 tokens] times V pairs
// Pairs: the instruction wants the second operand as [depth / 2, 16 columns, 2], two consecutive depths side by side.
// Tiles 0-3 have 16 rows, 4-7 as many rows as there are vectors, at most 16.
#pragma once

#include "cpu_wide.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

struct AmxRoom {
  int64_t blocks;          // of 16 vectors
  float *query;            // [blocks, D, 16] q transposed
  uint32_t *head, *rest;   // [blocks, D / 2, 16] pairs of the (folded) query
  float *start;            // [blocks, 16] q . min of the current block
  uint16_t *rows;          // [WIDE_TILE + 16, D] K or V rows that cannot be used in place
  uint32_t *v;             // [WIDE_TILE / 2, D] pairs of V
  uint16_t *weights[2];    // [blocks * 16, WIDE_TILE] heads and rests
  float *square;           // [16, 16]
  float *scale, *minimum;  // [max(D, WIDE_TILE)]
  float *added;            // [blocks * 16] what the minima of V add to every channel
  bool folded;             // head and rest belong to a quantized block
};

// The compiler's tile intrinsics do not say that they touch memory.
COMMITKV_INLINE void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Brings the K and V rows of a tile to be used next into the second-level cache, a few lines at a time.
struct Ahead {
  const Tile &tile;
  int64_t row_bytes[2];  // of K and V
  int32_t run, plane;
  int64_t at;

  inline void step(int lines) {
    while (lines > 0 && run < tile.num_runs) {
      const Run &r = tile.runs[run];
      const uint8_t *from = plane ? r.v : r.k;
      const int64_t end = r.count * row_bytes[plane];
      for (; lines > 0 && at < end; at += 64, --lines) __builtin_prefetch(from + at, 0, 2);
      if (at < end) return;
      at = 0, run += plane, plane ^= 1;
    }
  }
};

static void configure_tiles(int64_t vectors) {
  alignas(64) uint8_t config[64] = {1};
  const uint8_t rows = uint8_t(vectors < 16 ? vectors : 16);
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = tile < 4 ? 16 : rows;
  }
  memory_barrier();
  _tile_loadconfig(config);
}

// Pairs of head and rest of query * scale (or of the query itself).
static void pack_query(const Work &w, AmxRoom &room, const float *scale) {
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
  for (int64_t b = 0; b < room.blocks; ++b) {
    const float *q = room.query + b * w.dim * 16;
    uint32_t *head = room.head + b * w.dim * 8, *rest = room.rest + b * w.dim * 8;
    for (int64_t d = 0; d < w.dim; d += 2, q += 32, head += 16, rest += 16) {
      const vf x = load(q) * set1(scale ? scale[d] : 1.0f), y = load(q + 16) * set1(scale ? scale[d + 1] : 1.0f);
      const __m512i xi = _mm512_castps_si512(x), yh = _mm512_and_si512(_mm512_castps_si512(y), high);
      _mm512_storeu_si512(head, _mm512_or_si512(_mm512_srli_epi32(xi, 16), yh));
      if (!scale) continue;
      const vf x_rest = x - _mm512_castsi512_ps(_mm512_and_si512(xi, high)), y_rest = y - _mm512_castsi512_ps(yh);
      const __m512i xr = _mm512_add_epi32(_mm512_castps_si512(x_rest), half);
      const __m512i yr = _mm512_add_epi32(_mm512_castps_si512(y_rest), half);
      _mm512_storeu_si512(rest, _mm512_or_si512(_mm512_srli_epi32(xr, 16), _mm512_and_si512(yr, high)));
    }
  }
  room.folded = scale != nullptr;
}

// start = q . min for every vector.
static void start_at_minimum(const Work &w, const AmxRoom &room) {
  for (int64_t b = 0; b < room.blocks; ++b) {
    const float *q = room.query + b * w.dim * 16;
    vf even = set1(0.0f), odd = set1(0.0f);
    for (int64_t d = 0; d < w.dim; d += 2) {
      even = fma(load(q + d * 16), set1(room.minimum[d]), even);
      odd = fma(load(q + d * 16 + 16), set1(room.minimum[d + 1]), odd);
    }
    store(room.start + b * 16, even + odd);
  }
}

// One row of codes as bf16 whole numbers (or the bf16 values themselves).
template <int Format>
COMMITKV_INLINE void codes_to_bf16(const uint8_t *row, int64_t dim, uint16_t *to) {
  if (Format == BF16) {
    std::memcpy(to, row, dim * 2);
  } else if (Format == I8) {
    for (int64_t d = 0; d < dim; d += 32) {
      _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(load_u8(row + d + 16), load_u8(row + d)));
    }
  } else {
    for (int64_t d = 0; d < dim / 2; d += 16) {
      _mm256_storeu_si256((__m256i *)(to + d), (__m256i)_mm512_cvtneps_pbh(load_u4_low(row + d)));
      _mm256_storeu_si256((__m256i *)(to + dim / 2 + d), (__m256i)_mm512_cvtneps_pbh(load_u4_high(row + d)));
    }
  }
}

// logits[m][first + t] of the 16 K rows at `k`, for all vectors.
static void logits_of_16(const Work &w, const AmxRoom &room, const uint16_t *k, int64_t first) {
  for (int64_t b = 0; b < room.blocks; ++b) {
    const uint32_t *head = room.head + b * w.dim * 8, *rest = room.rest + b * w.dim * 8;
    memory_barrier();
    _tile_zero(0);
    for (int64_t d = 0; d < w.dim; d += 32) {
      _tile_loadd(2, k + d, w.dim * 2);
      _tile_loadd(3, head + d * 8, 64);
      _tile_dpbf16ps(0, 2, 3);
      if (!room.folded) continue;
      _tile_loadd(1, rest + d * 8, 64);
      _tile_dpbf16ps(0, 2, 1);
    }
    _tile_stored(0, room.square, 64);
    memory_barrier();
    const vf start = load(room.start + b * 16);
    vf rows[16];
    for (int t = 0; t < 16; ++t) rows[t] = load(room.square + t * 16) + start;
    transpose(rows, w.logits + b * 16 * w.logit_stride + first, w.logit_stride);
  }
}

template <int Format>
static void logits_of_tile(const Args &a, const Tile &tile, const Work &w, AmxRoom &room, Ahead &ahead) {
  const int64_t row_bytes = code_row_bytes(Format, w.dim);
  if (!quantized(Format)) {
    if (room.folded) pack_query(w, room, nullptr);
    std::memset(room.start, 0, room.blocks * 64);
  }
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    if (quantized(Format)) {
      widen_f16(halves(run.block, a.k_scale), w.dim, room.scale);
      widen_f16(halves(run.block, a.k_min), w.dim, room.minimum);
      pack_query(w, room, room.scale);
      start_at_minimum(w, room);
    }
    for (int32_t j = 0; j < run.count; j += 16) {
      const int32_t left = run.count - j < 16 ? run.count - j : 16;
      const uint8_t *from = run.k + j * row_bytes;
      ahead.step(int((16 * row_bytes) / 64));
      const uint16_t *rows = reinterpret_cast<const uint16_t *>(from);
      if (quantized(Format) || left < 16) {
        for (int32_t t = 0; t < left; ++t) codes_to_bf16<Format>(from + t * row_bytes, w.dim, room.rows + t * w.dim);
        std::memset(room.rows + left * w.dim, 0, (16 - left) * w.dim * 2);
        rows = room.rows;
      }
      logits_of_16(w, room, rows, run.first + j);
    }
  }
}

// room.v = pairs of V rows; rows beyond the tile, up to 32, are zero.
template <int Format>
static void pack_v(const Tile &tile, const Work &w, AmxRoom &room, Ahead &ahead) {
  const int64_t row_bytes = code_row_bytes(Format, w.dim), padded = round_up(tile.tokens, 32);
  const uint16_t *rows[WIDE_TILE];
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    for (int32_t j = 0; j < run.count; ++j) {
      const uint8_t *from = run.v + j * row_bytes;
      uint16_t *to = room.rows + (run.first + j) * w.dim;
      rows[run.first + j] = Format == BF16 ? reinterpret_cast<const uint16_t *>(from) : to;
      if (Format != BF16) codes_to_bf16<Format>(from, w.dim, to);
    }
  }
  uint16_t *zero = room.rows + WIDE_TILE * w.dim;
  for (int64_t t = tile.tokens; t < padded; ++t) rows[t] = zero;
  // Quarters of 4 channels go where unpacking within 128-bit lanes leaves the channels in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t t = 0; t < padded; t += 2) {
    uint32_t *to = room.v + t / 2 * w.dim;
    ahead.step(int(2 * row_bytes / 64));
    for (int64_t d = 0; d < w.dim; d += 32) {
      const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(rows[t] + d));
      const __m512i y = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(rows[t + 1] + d));
      _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(x, y));
      _mm512_storeu_si512(to + d + 16, _mm512_unpackhi_epi16(x, y));
    }
  }
}

// Splits the tile's weights into heads and rests; tokens up to 32 beyond it weigh nothing.
static void pack_weights(const Tile &tile, const Work &w, const AmxRoom &room) {
  const int64_t padded = round_up(tile.tokens, 32), whole = round_up(tile.tokens, W);
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
  for (int64_t m = 0; m < w.vectors; ++m) {
    float *weights = w.logits + m * w.logit_stride;
    if (whole < padded) store(weights + whole, set1(0.0f));
    for (int64_t t = 0; t < padded; t += 32) {
      const vf x = load(weights + t), y = load(weights + t + 16);
      const vf xh = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), high));
      const vf yh = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(y), high));
      _mm512_storeu_si512(room.weights[0] + m * WIDE_TILE + t, (__m512i)_mm512_cvtne2ps_pbh(yh, xh));
      _mm512_storeu_si512(room.weights[1] + m * WIDE_TILE + t, (__m512i)_mm512_cvtne2ps_pbh(y - yh, x - xh));
    }
  }
}

// sums += weights . V
static void add_weighed(const Tile &tile, const Work &w, const AmxRoom &room) {
  const int64_t stride = w.query_stride * 4, pair_stride = w.dim * 4;
  memory_barrier();
  for (int64_t b = 0; b < room.blocks; ++b) {
    for (int64_t d = 0; d < w.dim; d += 32) {
      float *sums = w.sums + b * 16 * w.query_stride + d;
      _tile_loadd(6, sums, stride);
      _tile_loadd(7, sums + 16, stride);
      for (int64_t t = 0; t < tile.tokens; t += 32) {
        const int64_t at = b * 16 * WIDE_TILE + t;
        _tile_loadd(2, room.v + t / 2 * w.dim + d, pair_stride);
        _tile_loadd(3, room.v + t / 2 * w.dim + d + 16, pair_stride);
        _tile_loadd(4, room.weights[0] + at, WIDE_TILE * 2);
        _tile_dpbf16ps(6, 4, 2);
        _tile_dpbf16ps(7, 4, 3);
        _tile_loadd(5, room.weights[1] + at, WIDE_TILE * 2);
        _tile_dpbf16ps(6, 5, 2);
        _tile_dpbf16ps(7, 5, 3);
      }
      _tile_stored(6, sums, stride);
      _tile_stored(7, sums + 16, stride);
    }
  }
  memory_barrier();
}

COMMITKV_INLINE bool amx_takes(int32_t format) { return format == BF16 || quantized(format); }

// A tile whose K and V formats amx_takes.
static void amx_tile(const Plan &plan, const Item &item, const List &list, const Tile &tile, Work &w, AmxRoom &room,
                     Ahead ahead) {
  const Args &a = plan.args;
  switch (k_format(a, tile)) {
    case BF16: logits_of_tile<BF16>(a, tile, w, room, ahead); break;
    case I8: logits_of_tile<I8>(a, tile, w, room, ahead); break;
    default: logits_of_tile<I4>(a, tile, w, room, ahead); break;
  }
  finish_logits(plan, item, list, tile, w);
  running_softmax(tile, w);
  const int32_t values = v_format(a, tile);
  if (quantized(values)) fold_weights(a, tile, w, room.added);
  for (int64_t m = 0; m < w.vectors; ++m) {
    const vf factor = set1(w.factors[m]), more = set1(quantized(values) ? room.added[m] : 0.0f);
    if (w.factors[m] == 1.0f && !quantized(values)) continue;
    float *sums = w.sums + m * w.query_stride;
    for (int64_t d = 0; d < w.dim; d += W) store(sums + d, fma(load(sums + d), factor, more));
  }
  pack_weights(tile, w, room);
  switch (values) {
    case BF16: pack_v<BF16>(tile, w, room, ahead); break;
    case I8: pack_v<I8>(tile, w, room, ahead); break;
    default: pack_v<I4>(tile, w, room, ahead); break;
  }
  add_weighed(tile, w, room);
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
