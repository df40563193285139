// Values of one row: members of candidates stream through the two stages in candidate order, at most E at a time; each
// candidate's sum is kept in fp32 by one warp. A group is what is finished together: a new block, or those entries of a
// block that stays which took others in. Every V below the line that nobody absorbed stays unread.
#pragma once

#include "commit/commit_lists.cuh"

namespace commit {

// Members [first, first + count) of a group; groups are the new blocks, then the row's old ones.
struct Chunk {
  int group, first, count;
  bool last;  // of its group
};

struct ValueViews {
  Barriers bars;
  Shared<uint8_t> stages, image;
  Shared<float> sums, biases;  // [E, D] in the place of the search tile, [E] in that of its squares

  HW_DEVICE explicit ValueViews(const CommitParams &p)
      : bars(barriers(p.at_barriers, BARRIERS)),
        stages(shared<uint8_t>(p.at_stages, p.num_stages * STAGE_BYTES)),
        image(shared<uint8_t>(p.at_image, IMAGE_BYTES)),
        sums(shared<float>(p.at_work, BLOCK_ENTRIES * HEAD_DIM)),
        biases(shared<float>(p.at_squares, BLOCK_ENTRIES)) {}

  HW_DEVICE Shared<uint8_t> stage(int i) const { return stages.at(i * STAGE_BYTES, STAGE_BYTES); }
};

// Candidates of a group: [first_candidate, first_candidate + count).
HW_DEVICE int first_candidate(const Row &row, int group) {
  return group < row.num_new ? group * BLOCK_ENTRIES : row.kept + (group - row.num_new) * BLOCK_ENTRIES;
}
HW_DEVICE int group_count(const Row &row, int group) {
  return group < row.num_new ? min_of(BLOCK_ENTRIES, row.kept - group * BLOCK_ENTRIES) : BLOCK_ENTRIES;
}

// The chunk that begins with member `first` of `group`, or with the first member of a later group that has any. A lane
// looks at a group each.
HW_DEVICE Chunk chunk_from(const Row &row, int group, int first) {
  const int groups = row.num_new + row.num_old;
  for (; group < groups; group += 32) {
    const int mine = min_of(group + lane(), groups - 1);
    const int mine_end = load(row.work.offset + first_candidate(row, mine) + group_count(row, mine));
    const uint32_t found = hw::ballot(mine_end > first);
    if (found == 0) continue;
    const int next = lowest_bit(found), end = shuffle(mine_end, next);
    return {group + next, first, min_of(end - first, BLOCK_ENTRIES), end - first <= BLOCK_ENTRIES};
  }
  return {group, first, 0, true};
}

HW_DEVICE Chunk next_chunk(const Row &row, const Chunk &chunk) {
  return chunk_from(row, chunk.group + (chunk.last ? 1 : 0), chunk.first + chunk.count);
}

// Starts the copies of a chunk's raw values into a stage. All warps.
HW_DEVICE void copy_chunk(const Row &row, const ValueViews &v, const Chunk &chunk, int to) {
  const int first = warp() * ROWS_OF_WARP, count = min_of(max_of(chunk.count - first, 0), ROWS_OF_WARP);
  RowCopy mine = {nullptr, 0};
  if (lane() < count) mine = value_copy(row, load(row.work.members + chunk.first + first + lane()).source);
  copy_begin(v.bars, to, warp_sum(mine.bytes));
  copy_rows(v.bars, to, v.stage(to).at(first * HALF_ROW, count * HALF_ROW), mine, count);
  copy_end(v.bars, to);
}

// Value of a member whose raw bytes are row r of the stage.
HW_DEVICE Channels read_value(const Row &row, Shared<uint8_t> stage, int r, int source) {
  if constexpr (QUANTIZED) {
    if (source < 0) {
      const uint8_t *block = row.old_block(block_of(source));
      const float scale = to_float(load(reinterpret_cast<const Fp16 *>(block + V_SCALE) + entry_of(source)));
      const float minimum = to_float(load(reinterpret_cast<const Fp16 *>(block + V_MIN) + entry_of(source)));
      Channels value = read_codes<V_BITS>(stage, r * HALF_ROW);
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) value.x[i] = value.x[i] * scale + minimum;
      return value;
    }
  }
  return read_values<Half>(stage, r * HALF_ROW);
}

// Adds one member to the sum of its candidate, which is entry e of its group. The candidate's warp.
HW_DEVICE void add_value(const Row &row, const ValueViews &v, Shared<uint8_t> stage, int r, const Member &member,
                         int e) {
  const Channels value = read_value(row, stage, r, member.source);
  const bool is_first = member.candidate < row.kept ? load(row.work.kept + member.candidate) == member.source
                                                     : -1 - (member.candidate - row.kept) == member.source;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    const int at = e * HEAD_DIM + channel(i);
    const float before = is_first ? 0.0f : v.sums.load(at);
    v.sums.store(at, before + member.share * value.x[i]);
  }
  if (lane() == 0) v.biases.store(e, (is_first ? 0.0f : v.biases.load(e)) + member.bias);
}

// Adds a chunk that has arrived. All warps; warp w owns entries e with e % num_warps = w.
HW_DEVICE void add_chunk(const Row &row, const ValueViews &v, const Chunk &chunk, Shared<uint8_t> stage) {
  const int base = first_candidate(row, chunk.group), own = warp();
  for (int first = 0; first < chunk.count; first += 32) {
    Member mine = {0, -1, 0.0f, 0.0f};
    if (first + lane() < chunk.count) mine = load(row.work.members + chunk.first + first + lane());
    const bool is_mine = mine.candidate >= 0 && (mine.candidate - base) % WARPS == own;
    const uint32_t owned = hw::ballot(is_mine);
    for (int i = 0; i < 32; ++i) {
      if ((owned >> i & 1u) == 0) continue;
      const Member member = {shuffle(mine.source, i), shuffle(mine.candidate, i), shuffle(mine.share, i),
                             shuffle(mine.bias, i)};
      add_value(row, v, stage, first + i, member, member.candidate - base);
    }
  }
}

// The sum of entry e as V codes at byte `at` of `to`; returns its scale.
template <typename Bytes>
HW_DEVICE Scale encode_value(const ValueViews &v, int e, const Bytes &to, int at) {
  Channels value;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) value.x[i] = v.sums.load(e * HEAD_DIM + channel(i));
  Scale s = {from_float<Fp16>(0.0f), from_float<Fp16>(0.0f)};
  if constexpr (QUANTIZED) {
    float low = value.x[0], high = value.x[0];
#pragma unroll
    for (int i = 1; i < CHANNELS; ++i) low = min_of(low, value.x[i]), high = max_of(high, value.x[i]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      low = min_of(low, shuffle_xor(low, mask)), high = max_of(high, shuffle_xor(high, mask));
    }
    s = scale_of<V_BITS>(low, high);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) value.x[i] = code_of<V_BITS>(value.x[i], to_float(s.scale), to_float(s.minimum));
  }
  write_codes<V_BITS>(to, at, value);
  return s;
}

// Puts the V part of a new block and its scores into the image: rows of codes, [v_scale, v_min,] bias, score.
HW_DEVICE void encode_group(const Row &row, const ValueViews &v, int group) {
  const Shared<Fp16> tail = v.image.at(BLOCK_ENTRIES * V_ROW, V_TAIL + 2 * BLOCK_ENTRIES).cast<Fp16>();
  const int count = group_count(row, group), base = first_candidate(row, group);
  for (int e = warp(); e < BLOCK_ENTRIES; e += WARPS) {
    Scale s = {from_float<Fp16>(0.0f), from_float<Fp16>(0.0f)};
    float bias = 0.0f, score = 0.0f;
    if (e < count) {
      s = encode_value(v, e, SharedBytes{v.image}, e * V_ROW);
      if (lane() == 0) bias = v.biases.load(e), score = score_of(row, load(row.work.kept + base + e));
    } else {
      Channels nothing;
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) nothing.x[i] = 0.0f;
      write_codes<V_BITS>(SharedBytes{v.image}, e * V_ROW, nothing);
    }
    if (lane() != 0) continue;
    if constexpr (QUANTIZED) {
      tail.store(e, s.scale);
      tail.store(BLOCK_ENTRIES + e, s.minimum);
    }
    tail.store(V_TAIL / 2 - BLOCK_ENTRIES + e, from_float<Fp16>(bias));
    tail.store(V_TAIL / 2 + e, from_float<Fp16>(score));
  }
}

// Sends the image's V part to the new block and the scores to theirs. One warp, after a sync with those that wrote it.
HW_DEVICE void store_group(const Row &row, const ValueViews &v, int group) {
  const int64_t id = load(row.p.new_ids + row.first_new + group);
  if (id < 0) return;
  uint8_t *block = row.p.blocks + id * BLOCK_BYTES;
  const int tail = BLOCK_ENTRIES * V_ROW;
  bulk_store(block + V_CODES, v.image.at(0, tail), tail);
  bulk_store(block + (QUANTIZED ? V_SCALE : BIAS), v.image.at(tail, V_TAIL), V_TAIL);
  bulk_store(row.p.score + id * BLOCK_ENTRIES, v.image.at(tail + V_TAIL, 2 * BLOCK_ENTRIES), 2 * BLOCK_ENTRIES);
}

// Rewrites the entries of an old block that took others in: V, its scale, and the bias. Keys and scores stay.
HW_DEVICE void rewrite_group(const Row &row, const ValueViews &v, int group) {
  const int base = first_candidate(row, group), b = group - row.num_new;
  uint8_t *block = row.old_block(b);
  for (int e = warp(); e < BLOCK_ENTRIES; e += WARPS) {
    if (load(row.work.offset + base + e) == load(row.work.offset + base + e + 1)) continue;
    const Scale s = encode_value(v, e, GlobalBytes{block}, V_CODES + e * V_ROW);
    if (lane() != 0) continue;
    if constexpr (QUANTIZED) {
      store(reinterpret_cast<Fp16 *>(block + V_SCALE) + e, s.scale);
      store(reinterpret_cast<Fp16 *>(block + V_MIN) + e, s.minimum);
    }
    store(reinterpret_cast<Fp16 *>(block + BIAS) + e, from_float<Fp16>(v.biases.load(e)));
  }
}

}  // namespace commit
