// Prefill path of `attend`: many query vectors. A tile of K (transposed) and V is widened to fp32 once and multiplied
// by all vectors of the item with a register-blocked product. Also serves head_dims that are not whole vectors.
#pragma once

#include "../product.hpp"
#include "cpu_dot.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

// Room beyond Work: strides are query_stride (D rounded up to 32; the rest is zero) and WIDE_TILE.
struct WideRoom {
  float *k;                // [query_stride, WIDE_TILE] the tile's K, transposed
  float *v;                // [WIDE_TILE, query_stride]
  float *rows;             // [32, query_stride] rows on their way
  float *scale, *minimum;  // [D] of the block's K
};

// K row j of a run as floats, scales applied.
template <int Format>
static void widen_k(const Run &run, int32_t j, int64_t dim, const WideRoom &room, float *to) {
  widen_row<Format>(run.k + j * code_row_bytes(Format, dim), dim, to);
  if (!quantized(Format)) return;
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, fma(load(to + d), load(room.scale + d), load(room.minimum + d)));
  for (; d < dim; ++d) to[d] = to[d] * room.scale[d] + room.minimum[d];
}

// V row j of a run as floats, scales applied.
template <int Format>
static void widen_v(const Args &a, const Run &run, int32_t j, int64_t dim, float *to) {
  widen_row<Format>(run.v + j * code_row_bytes(Format, dim), dim, to);
  if (!quantized(Format)) return;
  const float scale = f16_to_float(halves(run.block, a.v_scale)[run.entry + j]);
  const float minimum = f16_to_float(halves(run.block, a.v_min)[run.entry + j]);
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, fma(load(to + d), set1(scale), set1(minimum)));
  for (; d < dim; ++d) to[d] = to[d] * scale + minimum;
}

// room.k[d][t] of the tile; tokens up to a whole vector are zero.
template <int Format>
static void widen_keys(const Args &a, const Tile &tile, const Work &w, const WideRoom &room) {
  const int64_t stride = w.query_stride;
  const auto flush = [&](int64_t first) {
    for (int64_t d = 0; d < stride; d += W) {
      vf rows[W];
      for (int i = 0; i < W; ++i) rows[i] = load(room.rows + i * stride + d);
      transpose(rows, room.k + d * WIDE_TILE + first, WIDE_TILE);
    }
  };
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    if (quantized(Format)) {
      widen_f16(halves(run.block, a.k_scale), a.head_dim, room.scale);
      widen_f16(halves(run.block, a.k_min), a.head_dim, room.minimum);
    }
    for (int32_t j = 0; j < run.count; ++j) {
      const int32_t token = run.first + j;
      widen_k<Format>(run, j, w.dim, room, room.rows + token % W * stride);
      if (token % W == W - 1) flush(token - (W - 1));
    }
  }
  if (const int64_t rest = tile.tokens % W) {
    std::memset(room.rows + rest * stride, 0, (W - rest) * stride * 4);
    flush(tile.tokens - rest);
  }
}

// room.v[t][d] of the tile.
template <int Format>
static void widen_values(const Args &a, const Tile &tile, const Work &w, const WideRoom &room) {
  for (int32_t r = 0; r < tile.num_runs; ++r) {
    const Run &run = tile.runs[r];
    for (int32_t j = 0; j < run.count; ++j) {
      widen_v<Format>(a, run, j, w.dim, room.v + (run.first + j) * w.query_stride);
    }
  }
}

static void wide_tile(const Plan &plan, const Item &item, const List &list, const Tile &tile, Work &w,
                      const WideRoom &room) {
  const Args &a = plan.args;
  switch (k_format(a, tile)) {
    case F32: widen_keys<F32>(a, tile, w, room); break;
    case BF16: widen_keys<BF16>(a, tile, w, room); break;
    case F16: widen_keys<F16>(a, tile, w, room); break;
    case I8: widen_keys<I8>(a, tile, w, room); break;
    default: widen_keys<I4>(a, tile, w, room); break;
  }
  switch (v_format(a, tile)) {
    case F32: widen_values<F32>(a, tile, w, room); break;
    case BF16: widen_values<BF16>(a, tile, w, room); break;
    case F16: widen_values<F16>(a, tile, w, room); break;
    case I8: widen_values<I8>(a, tile, w, room); break;
    default: widen_values<I4>(a, tile, w, room); break;
  }
  const int64_t stride = w.query_stride;
  product(Product{w.query, stride, room.k, WIDE_TILE, w.logits, w.logit_stride, w.vectors, w.dim, nullptr},
          round_up(tile.tokens, W));
  finish_logits(plan, item, list, tile, w);
  running_softmax(tile, w);
  product(Product{w.logits, w.logit_stride, room.v, stride, w.sums, stride, w.vectors, tile.tokens, w.factors},
          round_up(w.dim, W));
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
