// Keys of one row: candidates stream through the stages, a tile of at most E at a time, against the keys below the
// line, which lie in shared memory. A tile of kept entries is a new block: its K is quantized and written on the way,
// so that no key is read twice while those below fit (query_rows). Beyond that each slab of them streams the
// candidates again.
#pragma once

#include "commit/commit_lists.cuh"

namespace commit {

// A tile of candidates, the row's number-th: its new blocks, then those old ones that work.searched lists.
struct Tile {
  int number;
  bool is_new;
  int block;         // of the row's old blocks, if it is not new
  int first, count;  // candidates [first, first + count); count 0: behind the last tile
};

// Keys below the line in shared memory: entries [first, first + count), of which the first `coded` have a lower half.
struct Slab {
  int first, count, coded;
};

struct KeyViews {
  Barriers bars;
  Shared<uint8_t> stages, image, queries, scales;
  Shared<Half> high, low;  // [E, PADDED] tile, split so that high + low is the fp32 key but for 2^-17 (bf16) of it
  Shared<float> partials, squares, best, norms;

  HW_DEVICE explicit KeyViews(const CommitParams &p)
      : bars(barriers(p.at_barriers, BARRIERS)),
        stages(shared<uint8_t>(p.at_stages, p.num_stages * STAGE_BYTES)),
        image(shared<uint8_t>(p.at_image, IMAGE_BYTES)),
        queries(shared<uint8_t>(p.at_queries, p.query_rows * HALF_ROW)),
        scales(shared<uint8_t>(p.at_scales, p.cached_blocks * SCALES_BYTES)),
        high(shared<Half>(p.at_work, BLOCK_ENTRIES * PADDED)),
        low(shared<Half>(p.at_work + BLOCK_ENTRIES * PADDED * 2, QUANTIZED ? BLOCK_ENTRIES * PADDED : 0)),
        partials(shared<float>(p.at_partials, QUANTIZED ? WARPS * 2 * HEAD_DIM : 0)),
        squares(shared<float>(p.at_squares, BLOCK_ENTRIES)),
        best(shared<float>(p.at_best, p.query_rows)),
        norms(shared<float>(p.at_norms, p.query_rows)) {}

  HW_DEVICE Shared<uint8_t> stage(int i) const { return stages.at(i * STAGE_BYTES, STAGE_BYTES); }
};

// ---- keys of dissolved blocks: codes by row, scales once per block

// Starts the copies of the scales of the row's dissolved blocks. One warp, between copy_begin and copy_end.
HW_DEVICE void copy_scales(const Row &row, const KeyViews &v) {
  for (int i = 0; i < row.num_cached; ++i) {
    const uint8_t *block = row.old_block(load(row.work.dissolved + i));
    copy(v.bars, QUERY_BARRIER, v.scales.at(i * SCALES_BYTES, SCALES_BYTES), block + K_SCALE, SCALES_BYTES);
  }
}

HW_DEVICE Channels scaled(Channels codes, const Channels &scale, const Channels &minimum) {
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) codes.x[i] = codes.x[i] * scale.x[i] + minimum.x[i];
  return codes;
}

HW_DEVICE Channels fp16_channels(const uint8_t *from) {
  Channels c;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) c.x[i] = to_float(load(reinterpret_cast<const Fp16 *>(from) + channel(i)));
  return c;
}

// The key of an entry of a dissolved block, whose codes begin at byte `at`.
HW_DEVICE Channels read_coded_key(const Row &row, const KeyViews &v, int source, Shared<uint8_t> raw, int at) {
  const Channels codes = read_codes<K_BITS>(raw, at);
  const int place = load(row.work.cached + block_of(source));
  if (place < 0) {  // more dissolved blocks than room: their scales are read again for every entry
    const uint8_t *block = row.old_block(block_of(source));
    return scaled(codes, fp16_channels(block + K_SCALE), fp16_channels(block + K_MIN));
  }
  return scaled(codes, read_values<Fp16>(v.scales, place * SCALES_BYTES),
                read_values<Fp16>(v.scales, place * SCALES_BYTES + 2 * HEAD_DIM));
}

// x = high + low with both in Half. Returns what low holds.
HW_DEVICE Channels rest_of(const Channels &c) {
  Channels rest;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) rest.x[i] = c.x[i] - to_float(from_float<Half>(c.x[i]));
  return rest;
}

HW_DEVICE float square_of(const Channels &c) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) sum += c.x[i] * c.x[i];
  return warp_sum(sum);
}

HW_DEVICE Channels zeros() {
  Channels c;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) c.x[i] = 0.0f;
  return c;
}

// ---- keys below the line

// The next slab behind `first`: lower halves lie at the end of the room, so they take rows from the others.
HW_DEVICE Slab next_slab(const Row &row, int first) {
  const int room = row.p.query_rows;
  const int coded = min_of(max_of(row.below_coded - first, 0), room / 2);
  const int count = min_of(row.below - first, (room - coded) / 16 * 16);
  const bool all_coded_fit = row.below_coded - first <= coded;
  return {first, all_coded_fit ? count : min_of(count, coded), coded};
}

HW_DEVICE int low_row(const Row &row, const Slab &slab, int query) { return row.p.query_rows - slab.coded + query; }

// Starts the copies of a slab's raw keys, and with the first slab those of scales. All warps.
HW_DEVICE void copy_slab(const Row &row, const KeyViews &v, const Slab &slab) {
  int bytes = 0;
  for (int first = warp() * 32; first < slab.count; first += WARPS * 32) {
    const int count = min_of(slab.count - first, 32), coded = min_of(max_of(slab.coded - first, 0), count);
    bytes += coded * K_ROW + (count - coded) * HALF_ROW;
  }
  const bool with_scales = slab.first == 0 && warp() == 0;
  if (with_scales) bytes += row.num_cached * SCALES_BYTES;
  copy_begin(v.bars, QUERY_BARRIER, bytes);
  if (with_scales) copy_scales(row, v);
  for (int first = warp() * 32; first < slab.count; first += WARPS * 32) {
    const int count = min_of(slab.count - first, 32);
    RowCopy mine = {nullptr, 0};
    if (lane() < count) mine = key_copy(row, load(row.work.below + slab.first + first + lane()));
    copy_rows(v.bars, QUERY_BARRIER, v.queries.at(first * HALF_ROW, count * HALF_ROW), mine, count);
  }
  copy_end(v.bars, QUERY_BARRIER);
}

// Once a slab has arrived: opens keys of dissolved blocks in place, takes norms, clears rows that fill up the last 16.
HW_DEVICE void open_slab(const Row &row, const KeyViews &v, const Slab &slab) {
  for (int q = warp(); q < (slab.count + 15) / 16 * 16; q += WARPS) {
    Channels key = zeros();
    if (q < slab.coded) {
      key = read_coded_key(row, v, load(row.work.below + slab.first + q), v.queries, q * HALF_ROW);
      warp_sync();  // every lane has read its codes
      write_values<Half>(v.queries, q * HALF_ROW, key);
      write_values<Half>(v.queries, low_row(row, slab, q) * HALF_ROW, rest_of(key));
    } else if (q < slab.count) {
      key = read_values<Half>(v.queries, q * HALF_ROW);
    } else {
      write_values<Half>(v.queries, q * HALF_ROW, key);
    }
    const float norm = square_of(key);
    if (lane() != 0) continue;
    v.norms.store(q, norm);
    v.best.store(q, q < slab.count ? infinity() : -infinity());
  }
}

// ---- tiles

// searches: whether there is anything to absorb, so that old blocks count.
HW_DEVICE Tile tile_of(const Row &row, bool searches, int number) {
  if (number < row.num_new) {
    const int first = number * BLOCK_ENTRIES;
    return {number, true, 0, first, min_of(BLOCK_ENTRIES, row.kept - first)};
  }
  if (!searches || number >= row.num_new + row.num_searched) return {number, false, 0, 0, 0};
  const int b = load(row.work.searched + number - row.num_new);
  return {number, false, b, row.kept + b * BLOCK_ENTRIES, load(row.p.old_lens + row.first_old + b)};
}

// Starts the copies of a tile's raw keys into a stage. All warps.
HW_DEVICE void copy_tile(const Row &row, const KeyViews &v, const Tile &tile, int to) {
  const Shared<uint8_t> stage = v.stage(to);
  if (!tile.is_new) {
    const int bytes = tile.count * K_ROW;
    copy_begin(v.bars, to, warp() == 0 ? bytes + SCALES_BYTES : 0);
    if (warp() == 0) {
      const uint8_t *block = row.old_block(tile.block);
      copy(v.bars, to, stage.at(0, bytes), block + K_CODES, bytes);
      if constexpr (QUANTIZED) {
        copy(v.bars, to, stage.at(BLOCK_ENTRIES * K_ROW, SCALES_BYTES), block + K_SCALE, SCALES_BYTES);
      }
    }
    copy_end(v.bars, to);
    return;
  }
  const int first = warp() * ROWS_OF_WARP, count = min_of(max_of(tile.count - first, 0), ROWS_OF_WARP);
  const int coded = min_of(max_of(row.kept_coded - tile.first - first, 0), count);
  copy_begin(v.bars, to, coded * K_ROW + (count - coded) * HALF_ROW);
  RowCopy mine = {nullptr, 0};
  if (lane() < count) mine = key_copy(row, load(row.work.kept + tile.first + first + lane()));
  copy_rows(v.bars, to, stage.at(first * HALF_ROW, count * HALF_ROW), mine, count);
  copy_end(v.bars, to);
}

// Key r of a tile that has arrived.
HW_DEVICE Channels tile_key(const Row &row, const KeyViews &v, const Tile &tile, Shared<uint8_t> stage, int r) {
  if constexpr (QUANTIZED) {
    if (tile.is_new && tile.first + r < row.kept_coded) {
      return read_coded_key(row, v, load(row.work.kept + tile.first + r), stage, r * HALF_ROW);
    }
    if (!tile.is_new) {
      const int scales = BLOCK_ENTRIES * K_ROW;
      return scaled(read_codes<K_BITS>(stage, r * K_ROW), read_values<Fp16>(stage, scales),
                    read_values<Fp16>(stage, scales + 2 * HEAD_DIM));
    }
  }
  return read_values<Half>(stage, r * HALF_ROW);
}

// Whether candidate r of a tile may absorb: protected entries and those below the line may not.
HW_DEVICE bool may_absorb(const Row &row, const Tile &tile, int r) {
  if (tile.is_new) return !protects(score_of(row, load(row.work.kept + tile.first + r)));
  return row.is_alive(tile.block, r) && !protects(score_of(row, source_of(tile.block, r)));
}

// Splits a tile's keys for the search and takes their squares; infinite: may not absorb.
HW_DEVICE void open_tile(const Row &row, const KeyViews &v, const Tile &tile, Shared<uint8_t> stage) {
  const int mine = warp() + lane() * WARPS;  // lane i asks for this warp's row i
  const uint32_t allowed = hw::ballot(mine < tile.count && may_absorb(row, tile, mine));
  for (int r = warp(), i = 0; r < (tile.count + 7) / 8 * 8; r += WARPS, ++i) {
    const bool counts = (allowed >> i & 1u) != 0;
    const Channels key = counts ? tile_key(row, v, tile, stage, r) : zeros();
    write_values<Half>(v.high.cast<uint8_t>(), r * PADDED * 2, key);
    if constexpr (QUANTIZED) write_values<Half>(v.low.cast<uint8_t>(), r * PADDED * 2, rest_of(key));
    const float square = square_of(key);
    if (lane() == 0) v.squares.store(r, counts ? square : infinity());
  }
}

// Smallest and largest value per channel over the rows of this warp.
HW_DEVICE void take_range(const Row &row, const KeyViews &v, const Tile &tile, Shared<uint8_t> stage) {
  Channels low = zeros(), high = zeros();
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) low.x[i] = infinity(), high.x[i] = -infinity();
  for (int r = warp(); r < tile.count; r += WARPS) {
    const Channels key = tile_key(row, v, tile, stage, r);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
      low.x[i] = min_of(low.x[i], key.x[i]), high.x[i] = max_of(high.x[i], key.x[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    v.partials.store(warp() * 2 * HEAD_DIM + channel(i), low.x[i]);
    v.partials.store((warp() * 2 + 1) * HEAD_DIM + channel(i), high.x[i]);
  }
}

// Scales of the lane's channels over all rows of the tile.
HW_DEVICE void key_scales(const KeyViews &v, Channels &scale, Channels &minimum) {
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    float low = infinity(), high = -infinity();
    for (int w = 0; w < WARPS; ++w) {
      low = min_of(low, v.partials.load(w * 2 * HEAD_DIM + channel(i)));
      high = max_of(high, v.partials.load((w * 2 + 1) * HEAD_DIM + channel(i)));
    }
    const Scale s = scale_of<K_BITS>(low, high);
    scale.x[i] = to_float(s.scale), minimum.x[i] = to_float(s.minimum);
  }
}

// Puts the K part of a new block into the image: rows of codes, then scales and minima.
HW_DEVICE void encode_keys(const Row &row, const KeyViews &v, const Tile &tile, Shared<uint8_t> stage) {
  Channels scale = zeros(), minimum = zeros();
  if constexpr (QUANTIZED) {
    key_scales(v, scale, minimum);
    if (warp() == 0) {
      write_values<Fp16>(v.image, BLOCK_ENTRIES * K_ROW, scale);
      write_values<Fp16>(v.image, BLOCK_ENTRIES * K_ROW + 2 * HEAD_DIM, minimum);
    }
  }
  for (int r = warp(); r < BLOCK_ENTRIES; r += WARPS) {
    Channels key = r < tile.count ? tile_key(row, v, tile, stage, r) : zeros();
    if constexpr (QUANTIZED) {
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) {
        key.x[i] = r < tile.count ? code_of<K_BITS>(key.x[i], scale.x[i], minimum.x[i]) : 0.0f;
      }
    }
    write_codes<K_BITS>(SharedBytes{v.image}, r * K_ROW, key);
  }
}

// Sends the image's K part to the new block. One warp, after a sync with those that wrote it.
HW_DEVICE void store_keys(const Row &row, const KeyViews &v, int index) {
  const int64_t id = load(row.p.new_ids + row.first_new + index);
  HW_CHECK(id < row.p.num_blocks, "commit: a new block's id outside the arena");
  if (id < 0) return;
  uint8_t *block = row.p.blocks + id * BLOCK_BYTES;
  bulk_store(block + K_CODES, v.image.at(0, BLOCK_ENTRIES * K_ROW), BLOCK_ENTRIES * K_ROW);
  if constexpr (QUANTIZED) {
    bulk_store(block + K_SCALE, v.image.at(BLOCK_ENTRIES * K_ROW, SCALES_BYTES), SCALES_BYTES);
  }
}

}  // namespace commit
