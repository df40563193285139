// `score`: the largest weight that given query rows put on each token and entry, once their log-sum-exp is known; or
// the norm of all of them.
//
//   q [rows, kv_heads * group, D] Half, lse [rows, kv_heads * group] fp32 natural (-inf: the row sees nothing)
//   score_rows [*]: the rows that record, ascending within a sequence
//   seen [num_pages, kv_heads, PAGE_TOKENS], score [num_blocks, BLOCK_ENTRIES] fp16: x = max(x, exp(logit - lse)), or
//     in tiles with `squares` x = sqrt(x^2 + the sum of exp(logit - lse)^2 over rows and heads)
//   pages, blocks, tables, tiles, block_tiles: as in attend.cu; a tile's first_row counts in score_rows
//
// Who calls it: plugins/score/cuda.py, after `attend` of a chunk or a probe, for the rows sampled from it. A tile has
// 64 query rows (row m: query head m % group of row m / group) in shared memory; the last warp copies keys, with their
// scales and biases, into the ring of kv_tiles.cuh; each of the four others takes a unit at a time, brings 16 keys into
// registers and passes all rows over them, 16 at a time, so that keys are read and dequantized once. Only the maximum
// over rows leaves the registers: one atomic maximum per key.
// Rows whose squares add up are one tile however many they are, and 64 at a time pass over its units, which are copied
// again. A tile's units go to the same warps in every pass: each place is read and written by one thread of the launch,
// in the order of rows. So no atomics, and the same bits on every GPU of an architecture, whatever its size.
#include "kv_rows.cuh"

namespace {

struct ScoreArgs {
  KvArgs kv;
  const Half *q;
  const float *lse;
  Fp16 *seen, *score;
  const int32_t *score_rows, *record_skip, *tiles, *block_tiles;
  float scale;
  int32_t num_stages;
};

HW_DEVICE void consumers_sync() { named_sync(1, 32 * NUM_CONSUMERS); }

// Keys of one step: their registers, how many are filled, positions (pages) or biases (blocks).
struct ScoreKeys {
  uint32_t pairs[2][LIST_PAIRS];
  int filled[2], position[2];
  Vec<float, 2> bias[2];
};

struct Scorer {
  const ScoreArgs &p;
  Ring ring;
  int fills;  // of the tiles before
  QueryRows queries;

  HW_DEVICE Shared<float> row_lse() const { return shared<float>(ROW_LSE_AT, QUERY_ROWS); }
  HW_DEVICE Shared<int32_t> row_limits() const { return shared<int32_t>(ROW_LIMITS_AT, QUERY_ROWS); }

  HW_DEVICE void tile(const Tile &t) {
    for (int m = warp(); m < QUERY_ROWS; m += NUM_CONSUMERS) load_row(t, m);
    consumers_sync();
    if (t.squares) {
      units<true>(t);
    } else {
      units<false>(t);
    }
    fills += t.num_units;
    consumers_sync();
  }

 private:
  // SQUARES: squares are added up, else maxima raised.
  template <bool SQUARES>
  HW_DEVICE void units(const Tile &t) const {
    for (int unit = warp(); unit < t.num_units; unit += NUM_CONSUMERS) {
      const int stage = ring.await(fills + unit);
      if (t.first_unit + unit < t.page_units) {
        page_unit<SQUARES>(t, stage);
      } else {
        block_unit<SQUARES>(t, stage);
      }
      ring.release(stage);
    }
  }

  // Query row m, its log-sum-exp in log2 (+inf where there is nothing to record) and the page tokens it records.
  HW_DEVICE void load_row(const Tile &t, int m) const {
    const bool real = m < t.num_rows * p.kv.group;
    const int row = real ? load(p.score_rows + t.first_row + m / p.kv.group) : 0;
    const int64_t at = (static_cast<int64_t>(row) * p.kv.kv_heads + t.head) * p.kv.group + m % p.kv.group;
    queries.write(m, real ? p.q + at * HEAD_DIM : nullptr, p.scale);
    if (lane() != 0) return;
    const float lse = real ? load(p.lse + at) : -infinity();
    const int end_row = load(p.kv.row_starts + t.sequence + 1), skip = load(p.record_skip + t.sequence);
    row_lse().store(m, lse > LOWEST ? lse * LOG2E : infinity());
    row_limits().store(m, real ? t.page_tokens - (end_row - 1 - row) - skip : 0);
  }

  template <bool SQUARES>
  HW_DEVICE void page_unit(const Tile &t, int stage) const {
    const Shared<uint8_t> bytes = ring.stage(stage);
    for (int first = 0; first < UNIT_PAGES * PAGE_TOKENS; first += STEP_KEYS) {
      ScoreKeys keys;
      Fp16 *places[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int page = (first + 8 * n) / PAGE_TOKENS, offset = (first + 8 * n) % PAGE_TOKENS;
        const Header header = ring.header(stage, page);
        keys.filled[n] = header.filled - offset;
        keys.position[n] = header.position + offset;
        keys.bias[n] = {0.0f, 0.0f};
        page_keys(bytes, page * PAGE_BYTES + offset * PAGE_ROW_BYTES, keys.filled[n], keys.pairs[n]);
        places[n] = p.seen + (static_cast<int64_t>(header.id) * p.kv.kv_heads + t.head) * PAGE_TOKENS + offset;
      }
      if (keys.filled[0] <= 0 && keys.filled[1] <= 0) continue;
      weigh<true, false, SQUARES>(t, queries.pages(), keys, places);
    }
  }

  template <bool SQUARES>
  HW_DEVICE void block_unit(const Tile &t, int stage) const {
    const Shared<uint8_t> bytes = ring.stage(stage);
    const Header header = ring.header(stage, 0);
    if (header.filled == 0) return;
    ChannelField scale, minimum;
    scale.read(bytes, K_SCALE);
    minimum.read(bytes, K_MIN);
    for (int first = 0; first < header.filled; first += STEP_KEYS) {
      ScoreKeys keys;
      Fp16 *places[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        keys.filled[n] = header.filled - first - 8 * n;
        keys.position[n] = 0;
        keys.bias[n] = WHOLE_STEPS || keys.filled[n] > 0 ? block_bias(bytes, first + 8 * n) : Vec<float, 2>{0.0f, 0.0f};
        block_keys(bytes, first + 8 * n, keys.filled[n], keys.pairs[n]);
        dequantize(keys.pairs[n], scale, minimum);
        places[n] = p.score + static_cast<int64_t>(header.id) * BLOCK_ENTRIES + first + 8 * n;
      }
      weigh<false, QUANTIZED != 0, SQUARES>(t, QUANTIZED ? queries.codes() : queries.pages(), keys, places);
    }
  }

  HW_DEVICE static void dequantize(uint32_t (&pairs)[LIST_PAIRS], const ChannelField &scale,
                                   const ChannelField &minimum) {
    if (!QUANTIZED) return;
#pragma unroll
    for (int j = 0; j < LIST_PAIRS; ++j) {
      pairs[j] = fma2_fp16(code_of(pairs[j], is_high(K_BITS, j)), scale.pairs[j], minimum.pairs[j]);
    }
  }

  // All rows over 16 keys. PAGES: rows are limited in what they record.
  template <bool PAGES, bool FP16, bool SQUARES>
  HW_DEVICE void weigh(const Tile &t, Shared<uint8_t> rows, const ScoreKeys &keys, Fp16 *const (&places)[2]) const {
    const float none = SQUARES ? 0.0f : -infinity();
    float found[2][2] = {{none, none}, {none, none}};
    for (int first = 0; first < t.num_rows * p.kv.group; first += 16) {
      FragmentA q[CHANNEL_STEPS];
      QueryRows::read(rows, first, q);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        FragmentC s{{0.0f, 0.0f, 0.0f, 0.0f}};
        dot<FP16>(s, q, keys.pairs[n]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int m = first + lane() / 4 + 8 * i;
          const float factor = queries.factor().load(m), lse = row_lse().load(m);
          const int limit = PAGES ? row_limits().load(m) - keys.position[n] : 8;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const bool recorded = 2 * (lane() % 4) + e < min_of(limit, keys.filled[n]);
            const float above = s.r[2 * i + e] * factor + keys.bias[n][e] - lse;
            if constexpr (SQUARES) {
              found[n][e] += fast_exp2(recorded ? 2.0f * above : -infinity());
            } else {
              found[n][e] = max_of(found[n][e], recorded ? above : -infinity());
            }
          }
        }
      }
    }
    if constexpr (SQUARES) {
      add(found, keys, places);
    } else {
      raise(found, keys, places);
    }
  }

  // Maximum over the eight lanes that hold rows of the same keys, then over what is stored.
  HW_DEVICE void raise(float (&most)[2][2], const ScoreKeys &keys, Fp16 *const (&places)[2]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) most[n][e] = max_of(most[n][e], shuffle_xor(most[n][e], mask));
        const int key = 2 * (lane() % 4) + e;
        const float weight = fast_exp2(most[n][e]);
        if (lane() / 4 == 0 && key < keys.filled[n] && weight > 0.0f) atomic_max(places[n] + key, weight);
      }
    }
  }

  // Sum over the eight lanes that hold rows of the same keys, as a tree; then the norm with what is stored.
  HW_DEVICE void add(float (&sum)[2][2], const ScoreKeys &keys, Fp16 *const (&places)[2]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum[n][e] += shuffle_xor(sum[n][e], mask);
        const int key = 2 * (lane() % 4) + e;
        if (lane() / 4 == 0 && key < keys.filled[n] && sum[n][e] > 0.0f) {
          add_squares(places[n] + key, to_float(load(places[n] + key)), sum[n][e]);
        }
      }
    }
  }
};

// A pass over a tile: its rows from `from` on, as many as there is room for.
HW_DEVICE Tile pass_of(const Tile &t, int from, int rows) {
  Tile pass = t;
  pass.first_row = t.first_row + from;
  pass.num_rows = min_of(rows, t.num_rows - from);
  return pass;
}

}  // namespace

HW_KERNEL(score_tiles, ScoreArgs, KV_THREADS, MIN_BLOCKS) {
  const Ring ring{p.num_stages};
  ring.init(1);
  const int first = load(p.block_tiles + block()), end = load(p.block_tiles + block() + 1);
  const int rows = QUERY_ROWS / p.kv.group;
  if (warp() == NUM_CONSUMERS) {
    Producer<false> producer{p.kv, ring, 0, 0, 0};
    for (int i = first; i < end; ++i) {
      const Tile t = load_tile(p.tiles, i);
      for (int from = 0; from < t.num_rows; from += rows) producer.tile(t);
    }
  } else {
    Scorer scorer{p, ring, 0, {QUERY_ROWS}};
    for (int i = first; i < end; ++i) {
      const Tile t = load_tile(p.tiles, i);
      for (int from = 0; from < t.num_rows; from += rows) scorer.tile(pass_of(t, from, rows));
    }
  }
}
