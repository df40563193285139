// What the entry point hands to the per-level kernels of `attend`: arguments, work items, scratch sizes. Plain data.
//
// Words: S sequences, G KV heads, Q = G * group query heads, D head_dim, L tokens of a list. A list is what one
// (sequence, KV head) reads: its blocks in table order, then its pages. A segment is one block or page of it. M = rows
// times group, the query vectors of one item; vector m = row * group + head within the group.
#pragma once

#include "../cpu_support.hpp"

namespace commitkv {

// GOMP_parallel of the OpenMP library that the process already uses.
typedef void (*ParallelStart)(ParallelBody body, void *data, unsigned num_threads, unsigned flags);

// Mirrored field by field by `_Args` in native.py.
struct Args {
  const void *q;          // [rows, Q, D] q_dtype
  void *out;              // [rows, Q, D] q_dtype
  const uint8_t *pages;   // [num_pages, G, 2, page_tokens, D] page_dtype
  uint16_t *seen;         // [num_pages, G, page_tokens] fp16
  const uint8_t *blocks;  // [num_blocks, block_bytes]
  uint16_t *score;        // [num_blocks, block_entries] fp16
  const int32_t *row_starts, *page_starts, *page_ids, *page_lens, *block_starts, *block_ids, *block_lens;
  const int32_t *record_skip;  // [num_seqs] page tokens up to and including a row that are not recorded for it
  const uint8_t *record;   // [rows] 0, 1: the largest weight, SQUARES: the root of the sum of squares
  ParallelStart parallel;  // null: our own threads
  int64_t num_seqs, kv_heads, group, head_dim, page_tokens, block_entries, block_bytes;
  int64_t v_codes, k_scale, k_min, v_scale, v_min, bias;  // byte offsets in a block; K codes lie at 0
  int32_t q_dtype, page_dtype, k_format, v_format, num_threads, level;  // formats: of K and V in blocks
  float scale;
};

constexpr uint8_t SQUARES = 3;         // of Args::record, in all recorded rows of a sequence
constexpr int64_t SPLIT_TOKENS = 512;  // a list of one row tile is cut about every so many tokens
constexpr int64_t MAX_VECTORS = 192;   // query vectors of one item, at most (or one row's group, if that is more)
constexpr int64_t TILE = 64;           // tokens of one tile of the decode path
constexpr int64_t WIDE_TILE = 128;     // and of the prefill paths, and more than any other has
constexpr int64_t DOT_VECTORS = 8;     // up to so many query vectors the decode path is taken

// One piece of work: rows [row, row + rows) of the batch against segments [first_segment, last_segment) of a list.
struct Item {
  int32_t seq, head;
  int32_t row, rows;
  int32_t first_segment, last_segment;
  int32_t position;    // page tokens of the list before first_segment
  int32_t recorded;    // query vectors whose weights are recorded
  int64_t tokens;      // tokens in those segments
  int64_t offset;      // tokens of the list before first_segment
  float *partial;      // [M, D + 2] unnormalised sum, maximum, sum of weights; null: the item writes `out` itself
  float *recorded_to;  // partial: [recorded, stride] logits, stride = round_up(tokens, 16); else [tokens] largest
                       // weights, or sums of squares; null: nothing recorded
};

// The items of one (sequence, KV head); whoever finishes its last item combines them.
struct List {
  int32_t first_item, num_items;
  int32_t remaining;  // atomic
  int64_t tokens;
  int32_t page_tokens;  // of which in pages
  int32_t first_page_segment;
  float *largest;  // [tokens] room for what the items recorded together; null: nothing recorded
  bool squares;    // sums of squares instead of the largest
};

struct Plan {
  Args args;
  Item *items;
  List *lists;
  const int32_t *item_list;  // [num_items] list of each item
};

// What each level's unit exports. `scratch` has room for item_scratch_bytes, aligned to 64.
typedef void (*ItemKernel)(const Plan &plan, const Item &item, char *scratch);
typedef void (*FinishKernel)(const Plan &plan, const List &list);

// Upper bound of the scratch of one item: fp32 query, logits and sums, one converted tile, halves for AMX, and the
// logits of the recorded vectors when the item does not hand them on.
inline int64_t item_scratch_bytes(const Args &args, const Item &item) {
  const int64_t vectors = round_up(int64_t(item.rows) * args.group, 16), dim = round_up(args.head_dim, 32);
  const int64_t recorded = item.partial || !item.recorded_to ? 0 : item.recorded * round_up(item.tokens, 16);
  const int64_t floats = vectors * (3 * dim + 3 * WIDE_TILE + 8) + 4 * WIDE_TILE * dim + 64 * dim + recorded;
  return (floats + 4 * WIDE_TILE) * 4 + (1 << 16);
}

}  // namespace commitkv
