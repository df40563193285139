// `attend`: attention of query rows over active pages and committed blocks of their KV head.
//
//   q, out [rows, kv_heads * group, D] Half, lse [rows, kv_heads * group] fp32 (-inf where a row sees nothing)
//   pages [num_pages, kv_heads, {K, V}, PAGE_TOKENS, D] Half, seen [num_pages, kv_heads, PAGE_TOKENS] fp16
//   blocks [num_blocks, BLOCK_BYTES] bytes, score [num_blocks, BLOCK_ENTRIES] fp16
//   tables: plugins/attend/params.py; tiles [*, TILE_INTS] and block_tiles [grid + 1]: plugins/attend/tiles.py
//   parts [tiles, QUERY_ROWS, D] fp32, part_sums [tiles, QUERY_ROWS, {max, sum}] fp32, logits fp32: workspace
//
// attend_tiles: block b of the launch works on tiles [block_tiles[b], block_tiles[b + 1]). A tile is a run of units
//   (kv_tiles.cuh) of one (sequence, KV head), and query rows: row m of its QUERY_ROWS is query head m % group of
//   row m / group. The last warp copies units into a ring of stages, the four others compute:
//   QUERY_ROWS = 16 (decode): all four have the same 16 rows and take the units in turn. A block's scales are then
//     read by one warp, warps never wait for each other inside a tile, and four units are in work while others arrive;
//     what the warps found is added up in shared memory at the end of the tile.
//   QUERY_ROWS = 64 (chunks): each warp has 16 rows of its own, and all read every unit.
//   Rows whose KV is one tile are finished here; the others leave (max, sum, weighted values) in the workspace.
// attend_combine: merges the tiles of a row. For decode rows that record, it turns the logits kept into weights with
//   the final log-sum-exp and raises `seen` and `score`. Chunks record by `score` instead, in a second pass over some
//   of their rows.
//
// Bandwidth. An H100 moves 3.35 TB/s / 132 = 25 bytes a ns and multiprocessor, an H200 36. If a copy takes 1 us to
// arrive under load, 25 to 36 KB must be under way. MIN_BLOCKS blocks take nearly all shared memory as stages: 180 to
// 200 KB a multiprocessor, of which the consumers hold one stage of 5 to 17 KB each (kv_tiles.py, `residency`; the
// table is printed by plugins/occupancy.py). Instructions, counted in the code for sm_90a at D = 128: 16 page tokens
// (8,192 bytes) or 16 4-bit entries (2,272 bytes, a quarter of what a block costs once included) take a warp about 400.
// Four are issued a clock: 80 and 22 bytes a clock at most, where memory brings 15 (H100) or 21 (H200) at 1.7 GHz.
// So pages wait for memory, and 4-bit blocks are close to waiting for instructions on an H200. Not run on a card yet.
//
// Called by plugins/attend/cuda.py and the TensorRT plugin: the launches of one layer. The tile list and block_tiles
// are read from memory, so a captured graph replays with new tables.
#include "attend_combine.cuh"
#include "attend_rows.cuh"

namespace {

HW_DEVICE void consumers_sync() { named_sync(1, 32 * NUM_CONSUMERS); }

// Where the channels of tiles out[j .. j + RUN / 2) of a lane begin: a run of its list.
HW_DEVICE int channel_of(int j) { return j / (V_RUN / 2) * 4 * V_RUN + lane() % 4 * V_RUN + j % (V_RUN / 2) * 2; }

struct Consumer {
  const AttendArgs &p;
  Ring ring;
  int fills;  // of the tiles before
  QueryRows queries;

  HW_DEVICE int first_row() const { return SPLIT_UNITS ? 0 : 16 * warp(); }

  HW_DEVICE void tile(const Tile &t, int index) {
    WarpRows rows;
    rows.clear();
    load_queries(t);
    consumers_sync();
    rows.first = first_row();
    units(t, rows);
    fills += t.num_units;
    for (int i = 0; i < 2; ++i) rows.sum[i] = quad_sum(rows.sum[i]);
    if (SPLIT_UNITS) merge_warps(rows);
    // Read again, which costs less than registers all through the loop.
    if (!SPLIT_UNITS || warp() == NUM_CONSUMERS - 1) finish(load_tile(p.tiles, index), index, rows);
  }

 private:
  HW_DEVICE void load_queries(const Tile &t) const {
    constexpr int STEP = SPLIT_UNITS ? NUM_CONSUMERS : 1;
    const int end_row = load(p.kv.row_starts + t.sequence + 1), skip = load(p.record_skip + t.sequence);
    for (int n = 0; n < 16; n += STEP) {
      const int m = n + (SPLIT_UNITS ? warp() : first_row()), row = t.first_row + m / p.kv.group;
      const bool real = m < t.num_rows * p.kv.group;
      queries.write(m, real ? p.q + query_index(p, t, m) * HEAD_DIM : nullptr, p.scale);
      if (lane() != 0) continue;
      RowLimits limits{real ? t.page_tokens - (end_row - 1 - row) : 0, -1};
      if (t.logits >= 0 && real && load(p.record + row)) limits.recorded = max_of(limits.seen - skip, 0);
      row_limits().store_as(2 * m, limits);
    }
  }

  HW_DEVICE void units(const Tile &t, WarpRows &rows) const {
    constexpr int STEP = SPLIT_UNITS ? NUM_CONSUMERS : 1;
    const int num_pages = min_of(max_of(t.page_units - t.first_unit, 0), t.num_units);
    int unit = SPLIT_UNITS ? warp() : 0;
    FragmentA q[4];
    if (unit < num_pages) QueryRows::read_part(queries.pages(), first_row(), 0, q);
    for (; unit < num_pages; unit += STEP) {
      const int stage = ring.await(fills + unit);
      page_unit(stage, q, logits_of(t, unit), t, rows);
      ring.release(stage);
    }
    if (unit >= t.num_units) return;
    if (QUANTIZED) rows.enter_codes();
    if (!QUANTIZED) QueryRows::read_part(queries.pages(), first_row(), 0, q);
    for (; unit < t.num_units; unit += STEP) {
      const int stage = ring.await(fills + unit);
      block_unit(stage, q, logits_of(t, unit), t, rows);
      ring.release(stage);
    }
    if (QUANTIZED) rows.leave_codes();
  }

  // Of a unit of the tile: its columns of the logits kept, [query row][num_units * UNIT_KEYS], in 16 floats; -1 if none
  // are.
  HW_DEVICE static int logits_of(const Tile &t, int unit) {
    return SPLIT_UNITS && t.logits >= 0 ? t.logits + unit * (UNIT_KEYS / STEP_KEYS) : -1;
  }
  HW_DEVICE float *logits_at(int logits, int key) const {
    return p.logits + static_cast<int64_t>(logits) * STEP_KEYS + key;
  }

  HW_DEVICE void page_unit(int stage, const FragmentA (&q)[4], int logits, const Tile &t, WarpRows &rows) const {
    const Shared<uint8_t> bytes = ring.stage(stage);
    for (int first = 0; first < UNIT_PAGES * PAGE_TOKENS; first += STEP_KEYS) {
      StepKeys keys;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int page = (first + 8 * n) / PAGE_TOKENS, offset = (first + 8 * n) % PAGE_TOKENS;
        const Header header = ring.header(stage, page);
        keys.k_at[n] = page * PAGE_BYTES + offset * PAGE_ROW_BYTES;
        keys.v_at[n] = keys.k_at[n] + PAGE_RUN_BYTES;
        keys.filled[n] = header.filled - offset;
        keys.position[n] = header.position + offset;
      }
      if (keys.filled[0] <= 0 && keys.filled[1] <= 0) continue;
      FragmentC s[2];
      half_logits(s, q, rows, bytes, keys);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int seen[2] = {rows.limits(0).seen - keys.position[n], rows.limits(1).seen - keys.position[n]};
        rows.mask(s[n], keys.filled[n], seen, {0.0f, 0.0f});
        if (logits >= 0 && keys.filled[n] > 0) {
          rows.keep(logits_at(logits, first + 8 * n), t.num_units * UNIT_KEYS, s[n], keys.position[n]);
        }
      }
      add_page_values(rows, rows.weigh(s), bytes, keys);
    }
  }

  HW_DEVICE void block_unit(int stage, const FragmentA (&q)[4], int logits, const Tile &t, WarpRows &rows) const {
    const Shared<uint8_t> bytes = ring.stage(stage);
    const int len = ring.header(stage, 0).filled;
    if (len == 0) return;
    BlockQueries scaled;
    if constexpr (QUANTIZED) scaled.prepare(bytes, rows);
    const int all[2] = {ALL_KEYS, ALL_KEYS};
    for (int first = 0; first < len; first += STEP_KEYS) {
      const int filled[2] = {len - first, len - first - 8};
      const int k_at = K_CODES + first * K_ROW_BYTES, v_at = V_CODES + first * V_ROW_BYTES;
      const StepKeys keys{
          {k_at, k_at + 8 * K_ROW_BYTES}, {v_at, v_at + 8 * V_ROW_BYTES}, {filled[0], filled[1]}, {0, 0}};
      FragmentC s[2];
      if constexpr (!QUANTIZED) half_logits(s, q, rows, bytes, keys);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Vec<float, 2> bias =
            WHOLE_STEPS || filled[n] > 0 ? block_bias(bytes, first + 8 * n) : Vec<float, 2>{0.0f, 0.0f};
        if constexpr (QUANTIZED) {
          uint32_t pairs[LIST_PAIRS];
          block_keys(bytes, first + 8 * n, filled[n], pairs);
          s[n] = FragmentC{{0.0f, 0.0f, 0.0f, 0.0f}};
          dot<true>(s[n], scaled.q, pairs);
          rows.mask(s[n], filled[n], all, bias, BlockQueries::KEY_UNIT, scaled.start);
        } else {
          rows.mask(s[n], filled[n], all, bias);
        }
        if (logits >= 0 && filled[n] > 0) {
          rows.keep(logits_at(logits, first + 8 * n), t.num_units * UNIT_KEYS, s[n], BEFORE_LIMITS);
        }
      }
      if constexpr (QUANTIZED) {
        add_code_values(rows, s, bytes, first, filled);
      } else {
        add_page_values(rows, rows.weigh(s), bytes, keys);
      }
    }
  }

  // Adds the four warps' results up, in turn, in the last one. [values][lane] keeps banks apart.
  HW_DEVICE void merge_warps(WarpRows &rows) const {
    const Shared<float> sums = shared<float>(MERGE_SUMS_AT, NUM_CONSUMERS * 16 * 2);
    const Shared<float> values = shared<float>(MERGE_AT, HEAD_DIM / 2 * 32);
    const int g = lane() / 4, own = warp();  // warp() is collective: not inside a branch that lanes take apart
    if (lane() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums.store_as(2 * (16 * own + g + 8 * i), Vec<float, 2>{rows.top[i], rows.sum[i]});
      }
    }
    consumers_sync();
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = LOWEST, sum = 0.0f;
      Vec<float, 2> parts[NUM_CONSUMERS];
#pragma unroll
      for (int w = 0; w < NUM_CONSUMERS; ++w) {
        parts[w] = sums.load_as<Vec<float, 2>>(2 * (16 * w + g + 8 * i));
        top = max_of(top, parts[w][0]);
      }
#pragma unroll
      for (int w = 0; w < NUM_CONSUMERS; ++w) sum += parts[w][1] * fast_exp2(parts[w][0] - top);
      shrink[i] = fast_exp2(rows.top[i] - top);
      rows.top[i] = top, rows.sum[i] = sum;
    }
    rows.scale_out(shrink);
    for (int w = 0; w < NUM_CONSUMERS; ++w) {
      if (warp() == w) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 2; ++n) {
          float &mine = rows.out[n / 4].r[n % 4];
          if (w > 0) mine += values.load(32 * n + lane());
          if (w < NUM_CONSUMERS - 1) values.store(32 * n + lane(), mine);
        }
      }
      if (w < NUM_CONSUMERS - 1) consumers_sync();
    }
  }

  // Writes the finished rows, or this tile's part of them.
  HW_DEVICE void finish(const Tile &t, int index, const WarpRows &rows) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = first_row() + lane() / 4 + 8 * i;
      if (m >= t.num_rows * p.kv.group) continue;
      const int64_t part = static_cast<int64_t>(index) * QUERY_ROWS + m;
      if (t.num_splits > 1) {
        if (lane() % 4 == 0) {
          store(reinterpret_cast<Vec<float, 2> *>(p.part_sums) + part, Vec<float, 2>{rows.top[i], rows.sum[i]});
        }
        write_part(rows, i, p.parts + part * HEAD_DIM);
      } else {
        const int64_t at = query_index(p, t, m);
        const float sum = rows.sum[i];
        if (lane() % 4 == 0) store(p.lse + at, sum > 0.0f ? (rows.top[i] + fast_log2(sum)) * LN2 : -infinity());
        write_out(rows, i, sum > 0.0f ? 1.0f / sum : 0.0f, p.out + at * HEAD_DIM);
      }
    }
  }

  HW_DEVICE static void write_part(const WarpRows &rows, int i, float *to) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j += 2) {
      const Vec<float, 4> x{rows.out[j].r[2 * i], rows.out[j].r[2 * i + 1], rows.out[j + 1].r[2 * i],
                            rows.out[j + 1].r[2 * i + 1]};
      store(reinterpret_cast<Vec<float, 4> *>(to + channel_of(j)), x);
    }
  }

  HW_DEVICE static void write_out(const WarpRows &rows, int i, float scale, Half *to) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j += 4) {
      Vec<uint32_t, 4> x;
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = pack2(rows.out[j + n].r[2 * i] * scale, rows.out[j + n].r[2 * i + 1] * scale);
      store(reinterpret_cast<Vec<uint32_t, 4> *>(to + channel_of(j)), x);
    }
  }
};

}  // namespace

HW_KERNEL(attend_tiles, AttendArgs, KV_THREADS, MIN_BLOCKS) {
  const Ring ring{p.num_stages};
  ring.init(SPLIT_UNITS ? 1 : NUM_CONSUMERS);
  const int first = load(p.block_tiles + block()), end = load(p.block_tiles + block() + 1);
  if (warp() == NUM_CONSUMERS) {
    Producer<true> producer{p.kv, ring, 0, 0, 0};
    for (int i = first; i < end; ++i) producer.tile(load_tile(p.tiles, i));
  } else {
    Consumer consumer{p, ring, 0, {QUERY_ROWS}};
    for (int i = first; i < end; ++i) consumer.tile(load_tile(p.tiles, i), i);
  }
}

// A block takes one tile after the other: its share of the rows of the tile's group, then the weights of its own keys.
HW_KERNEL(attend_combine, AttendArgs, COMBINE_THREADS, 4) {
  const Shared<float> row_lse = shared<float>(0, QUERY_ROWS);
  const int num_tiles = load(p.block_tiles + p.num_ranges), warps = COMBINE_THREADS / 32;
  for (int i = block(); i < num_tiles; i += num_blocks()) {
    const Tile t = load_tile(p.tiles, i);
    const int rows = t.num_rows * p.kv.group, split = i - t.first_split;
    const bool records = SPLIT_UNITS && t.logits >= 0;
    if (t.num_splits == 1 && !records) continue;
    for (int m = warp(); m < rows; m += warps) {
      const bool merges = t.num_splits > 1 && m % t.num_splits == split;
      if (!merges && !records) continue;
      const float lse = t.num_splits > 1 ? merged_lse(p, t, m) : load(p.lse + query_index(p, t, m)) * LOG2E;
      if (merges) merge_row(p, t, m, lse);
      if (!records) continue;
      const bool recorded = lse > LOWEST && load(p.record + t.first_row + m / p.kv.group);
      if (lane() == 0) row_lse.store(m, recorded ? lse : infinity());
    }
    if (!records) continue;
    block_sync();
    if (t.squares) {
      record_tile<true>(p, t, row_lse);
    } else {
      record_tile<false>(p, t, row_lse);
    }
    block_sync();
  }
}
