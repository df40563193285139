// Decode path of `attend`: few query vectors, K and V used straight from their pages and blocks, codes widened in
// registers. Needs head_dim to be whole vectors (for int4, each half of it).
//
// int4/int8 K: q . k = q . min + sum_d (q_d scale_d) code_d, so scale and minimum are folded into q once per block.
// int4/int8 V: sum_j w_j v_j = sum_j w_j min_j + sum_j (w_j scale_j) codes_j.
#pragma once

#include "cpu_tiles.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

constexpr int HEADS = W == 16 ? 4 : 2;  // query vectors taken together, bounded by the registers
constexpr int LANES = 4;                // vectors of channels taken together when weighing V

COMMITKV_INLINE void prefetch(const uint8_t *from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// logits[h][j] = start[h] summed + query[h] . K row j, for Heads query vectors and the run's rows, four rows at a time
// (up to three logits beyond the run are overwritten with copies of its last).
template <int Format, int Vectors, int Heads>
static void dot_run(const Run &run, const Run *next, const float *query, const float *start, int64_t dim, float *logits,
                    int64_t stride) {
  const int64_t vectors = Vectors ? Vectors : dim / W, row_bytes = code_row_bytes(Format, dim);
  for (int32_t j = 0; j < run.count; j += 4) {
    const uint8_t *rows[4];
    for (int32_t t = 0; t < 4; ++t) rows[t] = run.k + (j + t < run.count ? j + t : run.count - 1) * row_bytes;
    if (next) prefetch(next->k + j * row_bytes, 4 * row_bytes);
    vf acc[4][Heads];
    for (int h = 0; h < Heads; ++h) {
      acc[0][h] = acc[1][h] = acc[2][h] = acc[3][h] = load(start + h * W);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      vf k[4];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) k[t] = codes<Format>(rows[t], i, dim);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) {
        const vf q = load(query + h * dim + i * W);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) acc[t][h] = fma(k[t], q, acc[t][h]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) reduce4(acc[0][h], acc[1][h], acc[2][h], acc[3][h], logits + h * stride + j);
  }
}

// sums[h] = sums[h] * factors[h] + added[h] + sum_j weights[h][j] * V row j, over Lanes vectors of channels.
template <int Format, int Lanes, int Heads>
static void weigh_tile(const Tile &tile, const Tile &next, int64_t first, const Work &w, int64_t m,
                       const float *added) {
  const int64_t row_bytes = code_row_bytes(Format, w.dim);
  vf acc[Heads][Lanes];
  for (int h = 0; h < Heads; ++h) {
    const vf factor = set1(w.factors[m + h]), more = set1(added[m + h]);
    for (int i = 0; i < Lanes; ++i) {
      acc[h][i] = fma(load(w.sums + (m + h) * w.query_stride + (first + i) * W), factor, more);
    }
  }
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    const bool ahead = first == 0 && m == 0 && r < next.num_runs;
    const float *weights = w.logits + m * w.logit_stride + run.first;
    for (int32_t j = 0; j < run.count; ++j) {
      const uint8_t *row = run.v + j * row_bytes;
      if (ahead) prefetch(next.runs[r].v + j * row_bytes, row_bytes);
      vf v[Lanes];
#pragma GCC unroll 4
      for (int i = 0; i < Lanes; ++i) v[i] = codes<Format>(row, first + i, w.dim);
#pragma GCC unroll 4
      for (int h = 0; h < Heads; ++h) {
        const vf weight = set1(weights[h * w.logit_stride + j]);
#pragma GCC unroll 4
        for (int i = 0; i < Lanes; ++i) acc[h][i] = fma(weight, v[i], acc[h][i]);
      }
    }
  }
  for (int h = 0; h < Heads; ++h) {
    for (int i = 0; i < Lanes; ++i) store(w.sums + (m + h) * w.query_stride + (first + i) * W, acc[h][i]);
  }
}

template <int Format, int Heads>
static void weigh_heads(const Tile &tile, const Tile &next, const Work &w, int64_t m, const float *added) {
  const int64_t vectors = w.dim / W;
  int64_t first = 0;
  for (; first + LANES <= vectors; first += LANES) weigh_tile<Format, LANES, Heads>(tile, next, first, w, m, added);
  for (; first < vectors; ++first) weigh_tile<Format, 1, Heads>(tile, next, first, w, m, added);
}

template <int Format, int Heads>
static void dot_heads(const Run &run, const Run *next, const float *query, const float *start, const Work &w,
                      int64_t m) {
  float *logits = w.logits + m * w.logit_stride + run.first;
  const float *q = query + m * w.dim, *s = start + m * W;
  if (w.dim == 4 * W)
    return dot_run<Format, 4, Heads>(run, m == 0 ? next : nullptr, q, s, w.dim, logits, w.logit_stride);
  if (w.dim == 8 * W)
    return dot_run<Format, 8, Heads>(run, m == 0 ? next : nullptr, q, s, w.dim, logits, w.logit_stride);
  dot_run<Format, 0, Heads>(run, m == 0 ? next : nullptr, q, s, w.dim, logits, w.logit_stride);
}

// Calls f.template at<Heads>(m) over all query vectors, HEADS at a time and the rest together.
template <typename F>
COMMITKV_INLINE void by_heads(int64_t vectors, const F &f) {
  int64_t m = 0;
  for (; m + HEADS <= vectors; m += HEADS) f.template at<HEADS>(m);
  const int64_t rest = vectors - m;
  if (rest == 1) f.template at<1>(m);
  if (HEADS > 2 && rest == 2) f.template at<2 < HEADS ? 2 : 1>(m);
  if (HEADS > 3 && rest == 3) f.template at<3 < HEADS ? 3 : 1>(m);
}

template <int Format>
struct DotRun {
  const Run &run;
  const Run *next;
  const float *query, *start;
  const Work &w;
  template <int Heads>
  void at(int64_t m) const {
    dot_heads<Format, Heads>(run, next, query, start, w, m);
  }
};

template <int Format>
struct WeighTile {
  const Tile &tile, &next;
  const Work &w;
  const float *added;
  template <int Heads>
  void at(int64_t m) const {
    weigh_heads<Format, Heads>(tile, next, w, m, added);
  }
};

// Room beyond Work that the decode path needs. Here query_stride is dim.
struct DotRoom {
  float *folded;           // [M, D] query times the block's K scales
  float *scale, *minimum;  // [D] of the block's K
  float start[DOT_VECTORS * W], zeros[DOT_VECTORS * W];
  float added[DOT_VECTORS];
};

// folded = q * scale; start = lanes of q . min not yet summed.
static void fold_scales(const Args &a, const Run &run, const Work &w, DotRoom &room) {
  widen_f16(halves(run.block, a.k_scale), w.dim, room.scale);
  widen_f16(halves(run.block, a.k_min), w.dim, room.minimum);
  for (int64_t m = 0; m < w.vectors; ++m) {
    vf start = set1(0.0f);
    for (int64_t d = 0; d < w.dim; d += W) {
      const vf q = load(w.query + m * w.query_stride + d);
      store(room.folded + m * w.dim + d, q * load(room.scale + d));
      start = fma(q, load(room.minimum + d), start);
    }
    store(room.start + m * W, start);
  }
}

// weights[h][j] *= scale_j; added[h] = sum_j weights[h][j] * min_j with the weights as they were, and `middle` times
// the sum of the new ones. largest[h]: of the new ones, unless null.
static void fold_weights(const Args &a, const Tile &tile, const Work &w, float middle, float *added, float *largest) {
  float scale[WIDE_TILE + 16], minimum[WIDE_TILE + 16];
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    widen_f16(halves(run.block, a.v_scale) + run.entry, run.count, scale + run.first);
    widen_f16(halves(run.block, a.v_min) + run.entry, run.count, minimum + run.first);
  }
  for (int64_t j = tile.tokens; j % W; ++j) scale[j] = minimum[j] = 0.0f;
  for (int64_t m = 0; m < w.vectors; ++m) {
    float *weights = w.logits + m * w.logit_stride;
    vf sum = set1(0.0f), top = set1(0.0f);
    for (int64_t j = 0; j < tile.tokens; j += W) {
      const vf before = load(weights + j), x = before * load(scale + j);
      sum = fma(before, load(minimum + j), fma(x, set1(middle), sum));
      top = vmax(top, x);
      store(weights + j, x);
    }
    added[m] = hsum(sum);
    if (largest) largest[m] = hmax(top);
  }
}

template <int Format>
static void dot_keys(const Args &a, const Tile &tile, const Tile &next, const Work &w, DotRoom &room) {
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    if (quantized(Format)) fold_scales(a, tile.runs[r], w, room);
    const float *query = quantized(Format) ? room.folded : w.query;
    by_heads(w.vectors, DotRun<Format>{tile.runs[r], r < next.num_runs ? next.runs + r : nullptr, query,
                                       quantized(Format) ? room.start : room.zeros, w});
  }
}

template <int Format>
static void weigh_values(const Args &a, const Tile &tile, const Tile &next, const Work &w, DotRoom &room) {
  if (quantized(Format)) fold_weights(a, tile, w, 0.0f, room.added, nullptr);
  by_heads(w.vectors, WeighTile<Format>{tile, next, w, room.added});
  if (quantized(Format)) std::memset(room.added, 0, sizeof(room.added));
}

static void dot_tile(const Plan &plan, const Item &item, const List &list, const Tile &tile, const Tile &next, Work &w,
                     DotRoom &room) {
  const Args &a = plan.args;
  switch (k_format(a, tile)) {
    case F32: dot_keys<F32>(a, tile, next, w, room); break;
    case BF16: dot_keys<BF16>(a, tile, next, w, room); break;
    case F16: dot_keys<F16>(a, tile, next, w, room); break;
    case I8: dot_keys<I8>(a, tile, next, w, room); break;
    default: dot_keys<I4>(a, tile, next, w, room); break;
  }
  finish_logits(plan, item, list, tile, w);
  running_softmax(tile, w);
  switch (v_format(a, tile)) {
    case F32: weigh_values<F32>(a, tile, next, w, room); break;
    case BF16: weigh_values<BF16>(a, tile, next, w, room); break;
    case F16: weigh_values<F16>(a, tile, next, w, room); break;
    case I8: weigh_values<I8>(a, tile, next, w, room); break;
    default: weigh_values<I4>(a, tile, next, w, room); break;
  }
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
