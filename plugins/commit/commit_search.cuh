// The nearest candidate of every key below the line: |c|^2 - 2 k.c by tensor cores, the gate by the distance itself.
//
// Keys of pages are Half already; keys of blocks are split in two Half, so products are those of fp32 keys but for the
// square of Half's rounding. The smallest value of each tile is compared with the best so far, and only where it wins the
// distance |k - c| is computed channel by channel (the difference of squares would cancel) and held against the gate.
#pragma once

#include "commit/commit_keys.cuh"

namespace commit {

constexpr int K_STEPS = HEAD_DIM / 16;

struct QueryFragments {
  FragmentA a[K_STEPS];
};

struct Best {
  float value;
  int candidate;  // row of the tile
};

HW_DEVICE Best smaller(Best a, Best b) {
  const bool second = b.value < a.value || (b.value == a.value && b.candidate < a.candidate);
  return second ? b : a;
}

// Queries [first, first + 16) of `rows`, the first of which lies in row `base` of their room; zero behind the last.
template <bool CUT>
HW_DEVICE void load_queries(const KeyViews &v, int base, int first, int rows, QueryFragments &f) {
  const int row = base + min_of(first + lane() % 16, rows - 1), column = lane() / 16 * 8;
  const Shared<Half> queries = v.queries.cast<Half>();
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    const Vec<uint32_t, 4> m = ldmatrix_x4(queries, row * HEAD_DIM + k * 16 + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) f.a[k].r[i] = !CUT || first + lane() / 4 + i % 2 * 8 < rows ? m[i] : 0u;
  }
}

// c += queries x candidates [first, first + 8) of a tile's high or low halves.
HW_DEVICE void multiply(FragmentC &c, const QueryFragments &f, Shared<Half> tile, int first) {
  const int at = (first + lane() % 8) * PADDED + lane() / 8 * 8;
#pragma unroll
  for (int k = 0; k < K_STEPS; k += 2) {
    const Vec<uint32_t, 4> m = ldmatrix_x4(tile, at + k * 16);
    mma(c, f.a[k], FragmentB{{m[0], m[1]}});
    mma(c, f.a[k + 1], FragmentB{{m[2], m[3]}});
  }
}

// Smallest |c|^2 - 2 k.c over the tile for rows g and g + 8 of the 16 queries; the same in the four lanes of a g.
template <bool QUERY_SPLIT>
HW_DEVICE void search_tile(const KeyViews &v, int count, bool tile_split, const QueryFragments &high,
                           const QueryFragments &low, Best (&best)[2]) {
  best[0] = best[1] = {infinity(), 0};
  for (int first = 0; first < count; first += 8) {
    FragmentC c = {{0.0f, 0.0f, 0.0f, 0.0f}};
    multiply(c, high, v.high, first);
    if (tile_split) multiply(c, high, v.low, first);
    if (QUERY_SPLIT) multiply(c, low, v.high, first);
    const int column = first + lane() % 4 * 2;
    const Vec<float, 2> squares = v.squares.load_as<Vec<float, 2>>(column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      best[i / 2] = smaller(best[i / 2], {squares[i % 2] - 2.0f * c.r[i], column + i % 2});
    }
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i] = smaller(best[i], {shuffle_xor(best[i].value, mask), shuffle_xor(best[i].candidate, mask)});
    }
  }
}

// |k - c|^2 of query q and row r of the tile. One warp.
HW_DEVICE float distance_of(const Row &row, const KeyViews &v, const Slab &slab, int q, int r) {
  const Channels query = read_values<Half>(v.queries, q * HALF_ROW);
  const Channels key = read_values<Half>(v.high.cast<uint8_t>(), r * PADDED * 2);
  Channels apart = zeros();
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) apart.x[i] = query.x[i] - key.x[i];
  if constexpr (QUANTIZED) {
    const Channels key_rest = read_values<Half>(v.low.cast<uint8_t>(), r * PADDED * 2);
    Channels query_rest = zeros();
    if (q < slab.coded) query_rest = read_values<Half>(v.queries, low_row(row, slab, q) * HALF_ROW);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) apart.x[i] += query_rest.x[i] - key_rest.x[i];
  }
  return square_of(apart);
}

// Holds the tile's smallest values for queries [first, first + 16) against the best so far. One warp.
HW_DEVICE void update_nearest(const Row &row, const KeyViews &v, const Slab &slab, const Tile &tile, int first,
                              const Best (&found)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int mine = first + half * 8 + lane() / 4;
    const bool wins = found[half].value < v.best.load(mine);
    const uint32_t winners = hw::ballot(wins && lane() % 4 == 0);
    warp_sync();  // all lanes have read the best before lane 0 writes it
    for (int g = 0; g < 8; ++g) {
      if ((winners >> (4 * g) & 1u) == 0) continue;
      const int q = first + half * 8 + g;
      const float value = shuffle(found[half].value, 4 * g);
      const int r = shuffle(found[half].candidate, 4 * g);
      const float distance = distance_of(row, v, slab, q, r);
      if (lane() != 0) continue;
      v.best.store(q, value);
      const bool near = distance < row.p.gate * row.p.gate * v.norms.load(q);
      store(row.work.nearest + slab.first + q, near ? tile.first + r : -1);
    }
  }
}

// All queries of the slab against one tile that has been opened. All warps; each takes 16 queries at a time.
HW_DEVICE void search(const Row &row, const KeyViews &v, const Slab &slab, const Tile &tile) {
  const bool tile_split = QUANTIZED && (!tile.is_new || tile.first < row.kept_coded);
  for (int first = warp() * 16; first < slab.count; first += WARPS * 16) {
    QueryFragments high, low;
    Best found[2];
    load_queries<false>(v, 0, first, row.p.query_rows, high);
    if (QUANTIZED && first < slab.coded) {
      load_queries<true>(v, low_row(row, slab, 0), first, slab.coded, low);
      search_tile<true>(v, tile.count, tile_split, high, low, found);
    } else {
      search_tile<false>(v, tile.count, tile_split, high, high, found);
    }
    update_nearest(row, v, slab, tile, first, found);
  }
}

}  // namespace commit
