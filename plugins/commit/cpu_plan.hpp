// What native.py hands to the kernels of `commit`: the second half of a commit, all rows at once. Plain data.
//
// Words: a row is layer * G + KV head; D head_dim, E block_entries. Moving entries of a row are the filled entries of
// its dissolved blocks in table order, then its staged tokens; those above the line are kept, the others below.
#pragma once

#include "../cpu_support.hpp"

namespace commitkv {

// Blocks of one conversation: row r owns [starts[r], starts[r + 1]) of ids and lens.
struct RowTable {
  const int64_t *starts, *ids, *lens;
};

// Mirrored field by field by `_Args` in native.py.
struct CommitArgs {
  uint8_t *const *pages;   // [num_layers] of [num_pages, G, 2, page_tokens, D] page_dtype
  uint16_t *const *seen;   // [num_layers] of [num_pages, G, page_tokens] fp16
  uint8_t *blocks;         // [num_blocks, block_bytes]
  uint16_t *score;         // [num_blocks, E] fp16
  const int64_t *staged;   // [num_staged] slots
  RowTable old, made;      // before and after the commit
  const uint8_t *dissolve, *is_new;   // per block of old and made
  const uint8_t *marks;               // [rows, num_staged] 0 below the line, 1 kept, 2 exact: left alone
  const float *staged_score;          // [rows, num_staged]
  const uint8_t *alive;               // [blocks of old, E]
  const int64_t *move_from, *move_to; // [num_moves] slots
  int64_t num_staged, num_moves, num_rows, kv_heads, head_dim, page_tokens, block_entries, block_bytes;
  int64_t v_codes, k_scale, k_min, v_scale, v_min, bias;  // byte offsets in a block; K codes lie at 0
  int64_t absorbed, dropped;                              // results
  int32_t page_dtype, k_format, v_format, threads, absorb;  // formats: of K and V; absorb: whether there is a gate
  float gate, tiny_weight;
};

constexpr int64_t CANDIDATES = 128;  // kept keys of one tile of the search

// Sizes of one row's working memory.
struct RowSize {
  int64_t moving;   // entries
  int64_t staying;  // entries above the line in blocks that stay
};

static inline RowSize row_size(const CommitArgs &a, int64_t row) {
  RowSize size = {a.num_staged, 0};
  for (int64_t b = a.old.starts[row]; b < a.old.starts[row + 1]; ++b) {
    if (a.dissolve[b]) {
      size.moving += a.old.lens[b];
    } else {
      for (int64_t e = 0; e < a.block_entries; ++e) size.staying += a.alive[b * a.block_entries + e];
    }
  }
  return size;
}

// Working memory of one row; every array is aligned to 64 bytes.
struct RowRoom {
  float *keys, *values;           // [moving, stride] kept entries from the front, those below from the back
  float *bias, *score;            // [moving]
  float *products;                // [moving, CANDIDATES]
  float *best;                    // [moving] smallest |c|^2 - 2 k.c so far
  int64_t *nearest;               // [moving] its candidate
  float *total;                   // [moving + staying] weight of a candidate with what it absorbs, 0: nothing
  float *merged, *merged_bias;    // [staying entries that absorb, stride], [..]
  int64_t *merged_at;             // [staying] row of `merged`
  int64_t *block, *offset;        // [staying] places
  float *tile, *rows, *squares;   // [D, CANDIDATES] transposed keys, [16, stride] on their way, [CANDIDATES]
  float *scale, *minimum;         // [stride]
  int64_t stride;                 // D rounded up to 16

  // Lays the arrays out in `memory`, or with null only adds up. Returns the bytes they take.
  int64_t lay_out(char *memory, const CommitArgs &a, const RowSize &size) {
    stride = round_up(a.head_dim, 16);
    const int64_t absorbing = size.staying < size.moving ? size.staying : size.moving;
    int64_t used = 0;
    const auto take = [&](auto *&array, int64_t count) {
      array = memory ? reinterpret_cast<decltype(+array)>(memory + used) : nullptr;
      used += round_up(count * int64_t(sizeof(*array)), 64);
    };
    take(keys, size.moving * stride), take(values, size.moving * stride);
    take(bias, size.moving), take(score, size.moving), take(products, size.moving * CANDIDATES);
    take(best, size.moving), take(nearest, size.moving), take(total, size.moving + size.staying);
    take(merged, absorbing * stride), take(merged_bias, absorbing), take(merged_at, size.staying);
    take(block, size.staying), take(offset, size.staying);
    take(tile, stride * CANDIDATES), take(rows, 16 * stride), take(squares, CANDIDATES);
    take(scale, stride), take(minimum, stride);
    return used;
  }
};

}  // namespace commitkv
