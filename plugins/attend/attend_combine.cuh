// What the two kernels of attend.cu share, and how attend_combine merges tiles and records decode rows.
#pragma once

#include "kv_tiles.cuh"

namespace {

struct AttendArgs {
  KvArgs kv;
  const Half *q;
  Half *out;
  float *lse;
  Fp16 *seen, *score;
  const uint8_t *record;
  const int32_t *record_skip, *tiles, *block_tiles;
  float *parts, *part_sums, *logits;
  float scale;
  int32_t num_stages, num_ranges;  // num_ranges: blocks that block_tiles was made for
};

constexpr bool SPLIT_UNITS = QUERY_ROWS == 16;
static_assert(QUERY_ROWS == 16 || QUERY_ROWS == 16 * NUM_CONSUMERS, "query rows of a tile");
constexpr int COMBINE_THREADS = 128;

// Index of row m of a tile in q, out (over HEAD_DIM) and lse.
HW_DEVICE int64_t query_index(const AttendArgs &p, const Tile &t, int m) {
  const int64_t row = t.first_row + m / p.kv.group;
  return (row * p.kv.kv_heads + t.head) * p.kv.group + m % p.kv.group;
}

// Merges row m of a tile's group: log2 of the sum of exponentials, over all its tiles. One warp.
HW_DEVICE float merged_lse(const AttendArgs &p, const Tile &t, int m) {
  const Vec<float, 2> *sums = reinterpret_cast<const Vec<float, 2> *>(p.part_sums);
  float top = LOWEST, sum = 0.0f;
  for (int n = lane(); n < t.num_splits; n += 32) {
    const Vec<float, 2> part = load(sums + static_cast<int64_t>(t.first_split + n) * QUERY_ROWS + m);
    const float new_top = max_of(top, part[0]);
    sum = sum * fast_exp2(top - new_top) + part[1] * fast_exp2(part[0] - new_top);
    top = new_top;
  }
#pragma unroll
  for (int n = 1; n < 32; n *= 2) {
    const float other_top = shuffle_xor(top, n), other_sum = shuffle_xor(sum, n), new_top = max_of(top, other_top);
    sum = sum * fast_exp2(top - new_top) + other_sum * fast_exp2(other_top - new_top);
    top = new_top;
  }
  return sum > 0.0f ? top + fast_log2(sum) : -infinity();
}

// Adds the parts of row m up and writes out and lse. One warp; a lane has HEAD_DIM / 32 channels.
HW_DEVICE void merge_row(const AttendArgs &p, const Tile &t, int m, float lse) {
  constexpr int CHANNELS = HEAD_DIM / 32;
  using Channels = Vec<float, CHANNELS>;
  float sum[CHANNELS] = {};
  for (int n = 0; lse > LOWEST && n < t.num_splits; ++n) {
    const int64_t part = static_cast<int64_t>(t.first_split + n) * QUERY_ROWS + m;
    const float weight = fast_exp2(load(p.part_sums + 2 * part) - lse);
    const Channels x = load(reinterpret_cast<const Channels *>(p.parts + part * HEAD_DIM) + lane());
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) sum[c] += weight * x[c];
  }
  Vec<uint32_t, CHANNELS / 2> packed;
#pragma unroll
  for (int c = 0; c < CHANNELS / 2; ++c) packed[c] = pack2(sum[2 * c], sum[2 * c + 1]);
  const int64_t at = query_index(p, t, m);
  store(reinterpret_cast<Vec<uint32_t, CHANNELS / 2> *>(p.out + at * HEAD_DIM) + lane(), packed);
  if (lane() == 0) store(p.lse + at, lse > LOWEST ? lse * LN2 : -infinity());
}

// Where the largest weight of key `key` of a unit goes; null if nothing lies there.
HW_DEVICE Fp16 *place_of(const AttendArgs &p, const Tile &t, int unit, int key) {
  if (unit < t.page_units) {
    const int page = key / PAGE_TOKENS, offset = key % PAGE_TOKENS;
    const int item = load(p.kv.page_starts + t.sequence) + unit * UNIT_PAGES + page;
    if (page >= UNIT_PAGES || item >= load(p.kv.page_starts + t.sequence + 1)) return nullptr;
    const int id = load(p.kv.page_ids + item);
    if (id < 0 || offset >= load(p.kv.page_lens + item)) return nullptr;
    return p.seen + (static_cast<int64_t>(id) * p.kv.kv_heads + t.head) * PAGE_TOKENS + offset;
  }
  const int item = load(p.kv.block_starts + t.sequence * p.kv.kv_heads + t.head) + unit - t.page_units;
  const int id = load(p.kv.block_ids + item);
  if (id < 0 || key >= load(p.kv.block_lens + item)) return nullptr;
  return p.score + static_cast<int64_t>(id) * BLOCK_ENTRIES + key;
}

// Raises `seen` and `score` of the tile's keys. lse: of its rows, in log2, +inf for rows that do not record or saw
// nothing. SQUARES: adds squares up; no other tile of the launch has these keys.
template <bool SQUARES>
HW_DEVICE void record_tile(const AttendArgs &p, const Tile &t, Shared<float> lse) {
  const int keys = t.num_units * UNIT_KEYS, rows = t.num_rows * p.kv.group;
  const float *logits = p.logits + static_cast<int64_t>(t.logits) * STEP_KEYS;
  for (int key = thread(); key < keys; key += num_threads()) {
    Fp16 *place = place_of(p, t, t.first_unit + key / UNIT_KEYS, key % UNIT_KEYS);
    if (place == nullptr) continue;
    float found = SQUARES ? 0.0f : -infinity();
    for (int m = 0; m < rows; ++m) {
      const float above = lse.load(m);
      if (above < infinity()) {
        const float weight = load(logits + static_cast<int64_t>(m) * keys + key) - above;  // in log2
        found = SQUARES ? found + fast_exp2(2.0f * weight) : max_of(found, weight);
      }
    }
    if constexpr (SQUARES) {
      if (found > 0.0f) add_squares(place, to_float(load(place)), found);
    } else {
      const float weight = fast_exp2(found);
      if (weight > 0.0f) atomic_max(place, weight);
    }
  }
}

}  // namespace
