// What commit/cuda.py hands to the kernel of `commit`, and the geometry that all its parts share.
//
// Words: a row is layer * G + KV head; D HEAD_DIM, E BLOCK_ENTRIES. Moving entries of a row are the filled entries of
// its dissolved blocks in table order, then its staged tokens; those above the line are kept, the others below. A
// candidate may absorb entries below the line: kept entry c is candidate c, entry e of the row's old block b is
// kept + b * E + e. A source says where an entry lies: i >= 0 is staged token i, -(1 + b * E + e) is entry e of the
// row's old block b.
#pragma once

#include "hw.cuh"

namespace commit {

using namespace hw;

struct CommitParams {
  const uint64_t *layer_pages;  // [layers] addresses of [num_pages, G, 2, PAGE_TOKENS, D] Half
  const uint64_t *layer_seen;   // [layers] addresses of [num_pages, G, PAGE_TOKENS] fp16
  uint8_t *blocks;              // [num_blocks, BLOCK_BYTES]
  Fp16 *score;                  // [num_blocks, E]
  const int32_t *staged;        // [num_staged] slots; -1: padding
  const int32_t *old_starts, *old_ids, *old_lens;  // blocks of row r: [old_starts[r], old_starts[r + 1]); id -1: none
  const int32_t *new_starts, *new_ids, *new_lens;  // per row the blocks that stay, then the new ones
  const uint8_t *dissolve;      // [old blocks]
  const uint8_t *is_new;        // [new blocks]
  const uint8_t *alive;         // [old blocks, E]: filled and above the line
  const uint8_t *marks;         // [rows, num_staged] 0 below the line, 1 kept, 2 exact: left alone
  const float *staged_score;    // [rows, num_staged]
  const int32_t *move_from, *move_to;  // [num_moves] slots
  int32_t *workspace;           // [blocks of the launch, workspace_words]
  int32_t *counts;              // [2]: absorbed, dropped; added to
  int32_t num_staged, num_moves, num_rows, kv_heads;
  int32_t num_slots, num_blocks;                 // of the arenas, for HW_CHECK
  int32_t max_moving, max_old_blocks;            // of a row: what a workspace has room for; moving a multiple of 4
  int32_t workspace_words;
  int32_t num_stages;                            // of copies in flight
  int32_t query_rows;                            // room for keys below the line, a multiple of 32
  int32_t cached_blocks;                         // room for the key scales of a row's dissolved blocks
  int32_t absorb;                                // whether there is a gate
  float gate, tiny_weight;
  // Byte offsets in shared memory.
  int32_t at_stages, at_work, at_image, at_partials, at_squares, at_best, at_norms, at_scales, at_queries, at_sums;
  int32_t at_barriers;
};

constexpr int K_ROW = HEAD_DIM * K_BITS / 8, V_ROW = HEAD_DIM * V_BITS / 8;  // bytes of an entry's codes
constexpr int HALF_ROW = HEAD_DIM * 2;                                       // bytes of a token's K or V in a page
constexpr int STAGE_BYTES = BLOCK_ENTRIES * HALF_ROW;
constexpr int PADDED = HEAD_DIM + 8;       // Half in a row of a search tile: rows of 8 begin in different banks
constexpr int PAIRS = HEAD_DIM / 64;  // a lane owns channels lane * PAIRS + j and D / 2 + lane * PAIRS + j, j < PAIRS
constexpr int CHANNELS = 2 * PAIRS;
constexpr int THREADS = 256, WARPS = THREADS / 32;  // of a block of the launch
constexpr int ROWS_OF_WARP = (BLOCK_ENTRIES + WARPS - 1) / WARPS;
constexpr int MAX_STAGES = 4;
constexpr int SCALES_BYTES = QUANTIZED ? 4 * HEAD_DIM : 0;  // key scales and minima of a block
constexpr int V_TAIL = (QUANTIZED ? 6 : 2) * BLOCK_ENTRIES;  // v_scale, v_min and bias lie side by side in a block
constexpr int K_IMAGE = BLOCK_ENTRIES * K_ROW + SCALES_BYTES, V_IMAGE = BLOCK_ENTRIES * V_ROW + V_TAIL;
constexpr int IMAGE_BYTES = (K_IMAGE > V_IMAGE ? K_IMAGE : V_IMAGE) + 2 * BLOCK_ENTRIES;
constexpr int QUERY_BARRIER = MAX_STAGES;  // those before it belong to the stages
constexpr int BARRIERS = MAX_STAGES + 1;
constexpr float FP16_MAX = 65504.0f;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "channels of a lane");
static_assert(BLOCK_ENTRIES % 8 == 0 && ROWS_OF_WARP <= 32, "16-byte fields, a lane for each row of a warp");
static_assert(!QUANTIZED || (K_SCALE + 2 * HEAD_DIM == K_MIN && V_SCALE + 2 * BLOCK_ENTRIES == V_MIN &&
                             V_MIN + 2 * BLOCK_ENTRIES == BIAS),
              "fields that one copy takes lie side by side");

// One entry that goes into a candidate: itself or one that it absorbs.
struct alignas(16) Member {
  int32_t source, candidate;
  float share, bias;  // bias: share * (its bias - ln share)
};

// Working memory of one row in global memory: indexes only, a few bytes per moving entry.
struct Workspace {
  Member *members;                  // [2 * max_moving] in candidate order
  int32_t *nearest;                 // [max_moving] candidate of an entry below the line, or -1
  int32_t *kept, *below;            // [max_moving] sources
  int32_t *offset, *cursor;         // [max_moving + max_old_blocks * E + 1] first member of a candidate
  int32_t *dissolved, *searched;    // [max_old_blocks] old blocks that dissolve; that stay with an entry above the line
  int32_t *cached;                  // [max_old_blocks] place of a block's key scales in shared memory, or -1

  HW_DEVICE explicit Workspace(const CommitParams &p) {
    int32_t *at = p.workspace + static_cast<int64_t>(block()) * p.workspace_words;
    const int candidates = p.max_moving + p.max_old_blocks * BLOCK_ENTRIES + 1;
    members = reinterpret_cast<Member *>(at), nearest = at + 8 * p.max_moving;  // both 16-byte aligned
    kept = nearest + p.max_moving, below = kept + p.max_moving;
    offset = below + p.max_moving, cursor = offset + candidates;
    dissolved = cursor + candidates, searched = dissolved + p.max_old_blocks, cached = searched + p.max_old_blocks;
  }
};

// The row at work. All threads hold the same.
struct Row {
  const CommitParams &p;
  Workspace work;
  int index, head;
  Half *pages;             // of the row's layer
  int first_old, num_old;  // blocks before the commit
  int first_new, num_new;  // new blocks after it
  int kept, below;         // entries
  int kept_coded, below_coded;  // of which the first so many come from dissolved blocks
  int num_dissolved, num_searched, num_cached;  // old blocks

  HW_DEVICE uint8_t *old_block(int b) const {
    return p.blocks + static_cast<int64_t>(load(p.old_ids + first_old + b)) * BLOCK_BYTES;
  }
  HW_DEVICE bool dissolves(int b) const { return load(p.dissolve + first_old + b) != 0; }
  HW_DEVICE bool is_alive(int b, int e) const {
    return load(p.alive + static_cast<int64_t>(first_old + b) * BLOCK_ENTRIES + e) != 0;
  }
};

HW_DEVICE int source_of(int b, int e) { return -1 - b * BLOCK_ENTRIES - e; }
HW_DEVICE int block_of(int source) { return (-1 - source) / BLOCK_ENTRIES; }
HW_DEVICE int entry_of(int source) { return (-1 - source) % BLOCK_ENTRIES; }

// Where a token's K (kv 0) or V (kv 1) lies.
HW_DEVICE const Half *token_row(const Row &row, int slot, int kv) {
  HW_CHECK(slot < row.p.num_slots, "commit: a slot outside the pages");
  const int64_t plane = (static_cast<int64_t>(slot / PAGE_TOKENS) * row.p.kv_heads + row.head) * 2 + kv;
  return row.pages + (plane * PAGE_TOKENS + slot % PAGE_TOKENS) * HEAD_DIM;
}

HW_DEVICE float score_of(const Row &row, int source) {
  if (source >= 0) return load(row.p.staged_score + static_cast<int64_t>(row.index) * row.p.num_staged + source);
  const int64_t id = load(row.p.old_ids + row.first_old + block_of(source));
  return to_float(load(row.p.score + id * BLOCK_ENTRIES + entry_of(source)));
}

HW_DEVICE float bias_of(const Row &row, int source) {
  if (source >= 0) return 0.0f;
  const Fp16 *bias = reinterpret_cast<const Fp16 *>(row.old_block(block_of(source)) + BIAS);
  return to_float(load(bias + entry_of(source)));
}

HW_DEVICE bool protects(float score) { return score > FP16_MAX; }

HW_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

HW_DEVICE int warp_sum(int x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

}  // namespace commit
