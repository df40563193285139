// The nearest candidate of every key below the line: |c|^2 - 2 k.c by tensor cores, the gate by the distance itself.
//
// Keys of pages are Half already; keys of blocks are split in two Half, so products are those of fp32 keys but for the
// square of Half's rounding. The smallest value of each tile is compared with the best so far, and only where it wins
// the distance |k - c| is computed channel by channel (the difference of squares would cancel) and held to the gate.
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

// Queries [first, first + 16), channels [16 k, 16 k + 16).
HW_DEVICE FragmentA load_query(const KeyViews &v, int first, int k) {
  const int row = first + lane() % 16, column = k * 16 + lane() / 16 * 8;
  const Vec<uint32_t, 4> m = ldmatrix_x4(v.queries.cast<Half>(), row * HEAD_DIM + column);
  return {{m[0], m[1], m[2], m[3]}};
}

// The same of their lower halves; zero for those that have none.
HW_DEVICE FragmentA load_low_query(const Row &row, const KeyViews &v, const Slab &slab, int first, int k) {
  const int at = low_row(row, slab, min_of(first + lane() % 16, slab.coded - 1));
  const Vec<uint32_t, 4> m = ldmatrix_x4(v.queries.cast<Half>(), at * HEAD_DIM + k * 16 + lane() / 16 * 8);
  const bool above = first + lane() / 4 < slab.coded, under = first + lane() / 4 + 8 < slab.coded;
  return {{above ? m[0] : 0u, under ? m[1] : 0u, above ? m[2] : 0u, under ? m[3] : 0u}};
}

// Candidates [first, first + 8) of a tile's high or low halves, channels [16 k, 16 k + 32).
HW_DEVICE Vec<uint32_t, 4> load_candidates(Shared<Half> tile, int first, int k) {
  return ldmatrix_x4(tile, (first + lane() % 8) * PADDED + k * 16 + lane() / 8 * 8);
}

// c += queries x candidates [first, first + 8) of a tile's high or low halves.
HW_DEVICE void multiply(FragmentC &c, const QueryFragments &f, Shared<Half> tile, int first) {
#pragma unroll
  for (int k = 0; k < K_STEPS; k += 2) {
    const Vec<uint32_t, 4> m = load_candidates(tile, first, k);
    mma(c, f.a[k], FragmentB{{m[0], m[1]}});
    mma(c, f.a[k + 1], FragmentB{{m[2], m[3]}});
  }
}

// c += lower halves of queries [query, query + 16) x candidates [first, first + 8) of a tile. Their fragments are
// loaded for every 8 candidates: few queries come from dissolved blocks, and registers are dear.
HW_DEVICE void multiply_low(const Row &row, const KeyViews &v, const Slab &slab, FragmentC &c, int query, int first) {
#pragma unroll 1
  for (int k = 0; k < K_STEPS; k += 2) {
    const Vec<uint32_t, 4> m = load_candidates(v.high, first, k);
    mma(c, load_low_query(row, v, slab, query, k), FragmentB{{m[0], m[1]}});
    mma(c, load_low_query(row, v, slab, query, k + 1), FragmentB{{m[2], m[3]}});
  }
}

// Smallest |c|^2 - 2 k.c over the tile for rows g and g + 8 of queries [query, query + 16); the same in the four lanes
// of a g.
HW_DEVICE void search_tile(const Row &row, const KeyViews &v, const Slab &slab, const Tile &tile, int query,
                           Best (&best)[2]) {
  const bool tile_split = QUANTIZED && (!tile.is_new || tile.first < row.kept_coded);
  const bool query_split = QUANTIZED && query < slab.coded;
  QueryFragments queries;
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) queries.a[k] = load_query(v, query, k);
  best[0] = best[1] = {infinity(), 0};
  for (int first = 0; first < tile.count; first += 8) {
    FragmentC c = {{0.0f, 0.0f, 0.0f, 0.0f}};
    multiply(c, queries, v.high, first);
    if (tile_split) multiply(c, queries, v.low, first);
    if (query_split) multiply_low(row, v, slab, c, query, first);
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
  for (int first = warp() * 16; first < slab.count; first += WARPS * 16) {
    Best found[2];
    search_tile(row, v, slab, tile, first, found);
    update_nearest(row, v, slab, tile, first, found);
  }
}

}  // namespace commit
