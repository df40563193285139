// Walking a list tile by tile, and the running softmax over the logits of a tile. Shared by every path of `attend`.
#pragma once

#include "../codes.hpp"
#include "cpu_plan.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

constexpr float LOWEST = -1e30f;  // maximum of nothing: finite, so that differences of maxima never are NaN
constexpr float NEG_INF = -__builtin_inff();

// Consecutive tokens of one segment. K rows lie at k + j * bytes of a row of K, V rows at v + j * bytes of a row of V.
struct Run {
  const uint8_t *k, *v;
  const uint8_t *block;  // null: a page
  int32_t entry;         // of the first token within its block
  int32_t first, count;  // place in the tile
};

// Most tokens of a tile.
struct Capacity {
  int32_t blocks, pages;
};

constexpr Capacity DOT_CAPACITY = {TILE, TILE}, WIDE_CAPACITY = {WIDE_TILE, WIDE_TILE};

// Up to a capacity of tokens, all of pages or all of blocks.
struct Tile {
  Run runs[WIDE_TILE];
  int32_t num_runs, tokens;
  int32_t position;  // page tokens of the list before the tile (pages only)
  bool pages;
  int64_t offset;  // tokens of the item before the tile
  float bias[WIDE_TILE];
};

// How the tile holds K and V: a DType. Either both are codes of a quantized block or none is.
COMMITKV_INLINE int32_t k_format(const Args &a, const Tile &tile) { return tile.pages ? a.page_dtype : a.k_format; }
COMMITKV_INLINE int32_t v_format(const Args &a, const Tile &tile) { return tile.pages ? a.page_dtype : a.v_format; }
COMMITKV_INLINE bool quantized(int32_t format) { return format == I8 || format == I4; }

struct Cursor {
  int32_t segment, used, position;
  int64_t offset;
};

static Run page_run(const Plan &plan, const Item &item, int32_t index, int32_t used, int32_t count) {
  const Args &a = plan.args;
  const int64_t plane = a.page_tokens * a.head_dim * element_bytes(a.page_dtype);
  const int64_t page = a.page_ids[a.page_starts[item.seq] + index];
  const uint8_t *k = a.pages + (page * a.kv_heads + item.head) * 2 * plane;
  const int64_t skip = used * a.head_dim * element_bytes(a.page_dtype);
  return Run{k + skip, k + plane + skip, nullptr, used, 0, count};
}

static Run block_run(const Plan &plan, int64_t place, int32_t used, int32_t count) {
  const Args &a = plan.args;
  const uint8_t *block = a.blocks + int64_t(a.block_ids[place]) * a.block_bytes;
  const uint8_t *k = block + used * code_row_bytes(a.k_format, a.head_dim);
  return Run{k, block + a.v_codes + used * code_row_bytes(a.v_format, a.head_dim), block, used, 0, count};
}

// The scores of a segment lie scattered and are raised only when the whole list is done: fetch them early.
COMMITKV_INLINE void prefetch_scores(const Plan &plan, const Item &item, int64_t place, bool page) {
  const Args &a = plan.args;
  const uint16_t *from = page ? a.seen + (int64_t(a.page_ids[place]) * a.kv_heads + item.head) * a.page_tokens
                              : a.score + int64_t(a.block_ids[place]) * a.block_entries;
  for (int64_t i = 0; i < (page ? a.page_tokens : a.block_entries); i += 32) __builtin_prefetch(from + i, 0, 2);
}

// Scales, minima and biases of the blocks from `at` on, as many as a tile has: all are needed as soon as it begins.
COMMITKV_INLINE void prefetch_scales(const Plan &plan, const Cursor &at, int64_t first_block, int64_t last) {
  const Args &a = plan.args;
  for (int64_t segment = at.segment; segment < last; ++segment) {
    const uint8_t *block = a.blocks + int64_t(a.block_ids[first_block + segment]) * a.block_bytes;
    for (int64_t i = a.k_scale; i < a.block_bytes; i += 64) __builtin_prefetch(block + i, 0, 2);
  }
}

// Fills `tile` with the next tokens of the item; false at its end.
static bool next_tile(const Plan &plan, const Item &item, Cursor &at, Tile &tile, Capacity most) {
  const Args &a = plan.args;
  const int64_t list = int64_t(item.seq) * a.kv_heads + item.head;
  const int32_t num_blocks = a.block_starts[list + 1] - a.block_starts[list];
  tile.num_runs = tile.tokens = 0;
  tile.offset = at.offset, tile.position = at.position;
  while (at.segment < item.last_segment) {
    const bool page = at.segment >= num_blocks;
    const int32_t capacity = page ? most.pages : most.blocks;
    if (tile.tokens && (tile.pages != page || tile.tokens >= capacity)) break;
    tile.pages = page;
    const int64_t place = page ? a.page_starts[item.seq] + at.segment - num_blocks : a.block_starts[list] + at.segment;
    const int32_t length = page ? a.page_lens[place] : a.block_lens[place];
    const int32_t room = capacity - tile.tokens, left = length - at.used;
    const int32_t count = left < room ? left : room;
    if (count > 0) {
      Run run =
          page ? page_run(plan, item, at.segment - num_blocks, at.used, count) : block_run(plan, place, at.used, count);
      run.first = tile.tokens;
      if (!page) widen_f16(halves(run.block, a.bias) + at.used, count, tile.bias + run.first);
      tile.runs[tile.num_runs++] = run;
      if (item.recorded_to) prefetch_scores(plan, item, place, page);
      tile.tokens += count, at.used += count, at.offset += count;
      if (page) at.position += count;
    }
    if (at.used >= length) ++at.segment, at.used = 0;
  }
  const int32_t last = item.last_segment < num_blocks ? item.last_segment : num_blocks;
  const int32_t after = at.segment + most.blocks / int32_t(a.block_entries);
  prefetch_scales(plan, at, a.block_starts[list], after < last ? after : last);
  return tile.tokens > 0;
}

// Working memory of one item. vectors is M; row strides are in floats and multiples of 16.
struct Work {
  int64_t vectors, dim, query_stride, logit_stride;
  float *query;    // [M, query_stride] unscaled q
  float *logits;   // [M, logit_stride] logits of the tile, then its weights
  float *sums;     // [M, query_stride] weighted sum of V, relative to `maxima`
  float *maxima;   // [M rounded up to 16]
  float *totals;   // [M rounded up to 16] sum of weights
  float *factors;  // [M rounded up to 16] what the tile's new maximum makes of older sums
  float *kept;     // [recorded, round_up(tokens, 16)] logits of the recorded vectors, or null
  int64_t kept_stride;
};

// How many page tokens of the tile vector row `row` of the item may see (may be <= 0 or more than the tile has).
COMMITKV_INLINE int64_t visible(const Plan &plan, const Item &item, const List &list, const Tile &tile, int row) {
  const int32_t end = plan.args.row_starts[item.seq + 1];
  return list.page_tokens - (end - 1 - (item.row + row)) - tile.position;
}

COMMITKV_INLINE int64_t clamp_count(int64_t x, int64_t most) { return x < 0 ? 0 : x < most ? x : most; }

// logits = logits * scale + bias, hidden tokens and the padding up to a whole vector at -inf; recorded rows are kept,
// without the newest page tokens before them.
static void finish_logits(const Plan &plan, const Item &item, const List &list, const Tile &tile, Work &w) {
  const Args &a = plan.args;
  const int64_t padded = round_up(tile.tokens, W);
  const vf scale = set1(a.scale);
  float *kept = w.kept ? w.kept + tile.offset : nullptr;
  for (int32_t row = 0; row < item.rows; ++row) {
    int64_t shown = tile.tokens, recorded = tile.tokens;
    if (tile.pages) {
      const int64_t seen = visible(plan, item, list, tile, row), skip = a.record_skip[item.seq];
      shown = clamp_count(seen, shown), recorded = clamp_count(seen - skip, recorded);
    }
    const bool keep = kept && a.record[item.row + row];
    for (int64_t h = 0; h < a.group; ++h) {
      float *s = w.logits + (row * a.group + h) * w.logit_stride;
      if (tile.pages) {
        for (int64_t j = 0; j < tile.tokens; j += W) store(s + j, load(s + j) * scale);
      } else {
        for (int64_t j = 0; j < tile.tokens; j += W) store(s + j, fma(load(s + j), scale, load(tile.bias + j)));
      }
      for (int64_t j = shown; j < padded; ++j) s[j] = NEG_INF;
      if (keep) {
        std::memcpy(kept, s, recorded * 4);
        for (int64_t j = recorded; j < tile.tokens; ++j) kept[j] = NEG_INF;
        kept += w.kept_stride;
      }
    }
  }
}

// Turns the tile's logits into weights relative to the new maxima; updates maxima, totals and factors.
static void running_softmax(const Tile &tile, Work &w) {
  const int64_t padded = round_up(tile.tokens, W);
  for (int64_t m = 0; m < w.vectors; ++m) {
    const float *s = w.logits + m * w.logit_stride;
    vf top = load(s);
    for (int64_t j = W; j < padded; j += W) top = vmax(top, load(s + j));
    const float tile_max = hmax(top), old = w.maxima[m];
    const float now = tile_max > old ? tile_max : old;
    w.factors[m] = old - now;
    w.maxima[m] = now;
  }
  for (int64_t m = 0; m < w.vectors; m += W) store(w.factors + m, exp_nonpositive(load(w.factors + m)));
  for (int64_t m = 0; m < w.vectors; ++m) {
    float *s = w.logits + m * w.logit_stride;
    const vf top = set1(w.maxima[m]);
    vf total = set1(0.0f);
    for (int64_t j = 0; j < padded; j += W) {
      const vf weight = exp_nonpositive(load(s + j) - top);
      store(s + j, weight);
      total = total + weight;
    }
    w.totals[m] = w.totals[m] * w.factors[m] + hsum(total);
  }
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
