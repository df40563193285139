// What `attend` and `score` share: how keys and values come on chip, and how a warp reads them as tensor-core operands.
//
// UNITS. The KV of one (sequence, KV head) is a list of units: first its pages, UNIT_PAGES at a time, then its committed
// blocks, one each. A unit fills one stage of a ring in shared memory (STAGE_BYTES): pages [UNIT_PAGES][K, V][PAGE_TOKENS]
// [HEAD_DIM], or a block as layout.py lays it out. Lane n of the producer warp knows page or block n of the next 32, so
// that the tables cost one round trip to memory per 32 ids; the ring is deeper than that round trip.
//
// STAGES. full[s] completes when the bytes and the stage's header (filled tokens and first position of each page) are
// there; empty[s] when the warps that read the stage are done. Stages are used in turn, tile after tile, so the producer
// runs ahead of the consumers across tiles.
//
// OPERANDS. Copies are linear, so rows lie unswizzled, a power of two of bytes apart. Two freedoms make that cheap:
//   q.k: the order in which a product runs over channels is free, if Q has the same. Lane (g, t) = (lane / 4, lane % 4)
//     takes of row g the channels  p * 4R + t * R + [0, R),  p = 0, 1, ...  (R = 8 or 16: 16 bytes of what is stored), as
//     vectors: its "list" of HEAD_DIM / 4 channels. Step s of the product takes channels 4s .. 4s + 3 of each list.
//   p.v: the value operand needs two keys of one channel in a register, while a row holds two channels of one key. A row is
//     read as above and each register goes through `transpose_8x8`, 4-bit and 8-bit codes still packed: it moves 128 bytes of
//     codes. Column 2t + i of output tile j is then channel 2j + i of lane t's list.
// A quarter warp reads rows g and g + 1; where both begin at bank 0, odd rows take the vectors of a pair in the other
// order, which makes the 8 vectors of the quarter lie in different banks.
//
// CODES. A byte b under 0x64 is the fp16 1024 + b, a nibble n in the upper half of one 1024 + 16 n; one exact fma gives the
// code, a second one, rounded once, min + scale * code. Codes are multiplied as fp16 whatever ELEMENT is: scales are fp16,
// and bf16 would lose 3 of their bits. Queries are scaled by a power of two for that, so that they fit fp16 (`QueryRows`).
#pragma once

#include "hw.cuh"

namespace {

using namespace hw;

constexpr int PAGE_ROW_BYTES = HEAD_DIM * 2;
constexpr int PAGE_RUN_BYTES = PAGE_TOKENS * PAGE_ROW_BYTES;  // K or V of one (page, head)
constexpr int PAGE_BYTES = 2 * PAGE_RUN_BYTES;
constexpr int K_ROW_BYTES = HEAD_DIM * K_BITS / 8;  // of a block
constexpr int V_ROW_BYTES = HEAD_DIM * V_BITS / 8;
constexpr int LIST_PAIRS = HEAD_DIM / 8;   // registers of two channels that hold a lane's list
constexpr int CHANNEL_STEPS = HEAD_DIM / 16;
constexpr int KV_THREADS = 32 * (NUM_CONSUMERS + 1);  // NUM_CONSUMERS warps compute, the one after them copies
constexpr int STEP_KEYS = 16;     // keys that a warp handles at a time, as two tiles of 8
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float LOWEST = -1e30f;  // a running maximum before any key; finite, so that differences stay numbers
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "head_dim");
static_assert(PAGE_TOKENS % 8 == 0 && BLOCK_ENTRIES % 8 == 0, "tiles of 8 keys");
static_assert(UNIT_KEYS % STEP_KEYS == 0, "steps of 16 keys");

// R of a lane's list, for keys and for values.
constexpr int run_of(int bits) { return bits == 8 || (bits == 4 && HEAD_DIM == 128) ? 16 : 8; }
constexpr int K_RUN = run_of(K_BITS);
constexpr int V_RUN = run_of(V_BITS);

// Where the KV of a layer lies, and its tables (plugins/attend/params.py).
struct KvArgs {
  const uint8_t *pages, *blocks;
  const int32_t *row_starts, *page_starts, *page_ids, *page_lens, *block_starts, *block_ids, *block_lens;
  int32_t num_pages, num_blocks, kv_heads, group;
};

// A part of the KV of one (sequence, KV head), and rows that attend to it. Fields: plugins/attend/tiles.py.
struct Tile {
  int sequence, head, first_row, num_rows, first_unit, num_units, page_units, position, page_tokens;
  int first_split, num_splits, logits;
};

HW_DEVICE Tile load_tile(const int32_t *tiles, int i) {
  const Vec<int32_t, 4> *from = reinterpret_cast<const Vec<int32_t, 4> *>(tiles + static_cast<int64_t>(i) * TILE_INTS);
  Vec<int32_t, 4> f[TILE_INTS / 4];
#pragma unroll
  for (int n = 0; n < TILE_INTS / 4; ++n) f[n] = load(from + n);
#define TILE_FIELD(n) f[(n) / 4][(n) % 4]
  return {TILE_FIELD(TILE_SEQUENCE),    TILE_FIELD(TILE_HEAD),       TILE_FIELD(TILE_FIRST_ROW),
          TILE_FIELD(TILE_NUM_ROWS),    TILE_FIELD(TILE_FIRST_UNIT), TILE_FIELD(TILE_NUM_UNITS),
          TILE_FIELD(TILE_PAGE_UNITS),  TILE_FIELD(TILE_POSITION),   TILE_FIELD(TILE_PAGE_TOKENS),
          TILE_FIELD(TILE_FIRST_SPLIT), TILE_FIELD(TILE_NUM_SPLITS), TILE_FIELD(TILE_LOGITS)};
#undef TILE_FIELD
}

// ---- the ring

// filled: tokens or entries; position: of the first among the sequence's page tokens.
struct alignas(16) Header {
  int32_t filled, position, id, unused;
};

struct Ring {
  int num_stages;

  // Fills are counted over all tiles of a block; a stage takes every num_stages-th.
  HW_DEVICE int stage_of(int fill) const { return fill % num_stages; }
  HW_DEVICE int parity_of(int fill) const { return fill / num_stages & 1; }
  HW_DEVICE Barriers full() const { return barriers(BARRIERS_AT, MAX_STAGES); }
  HW_DEVICE Barriers empty() const { return barriers(BARRIERS_AT + 8 * MAX_STAGES, MAX_STAGES); }
  HW_DEVICE Shared<uint8_t> stage(int s) const { return shared<uint8_t>(STAGES_AT + s * STAGE_BYTES, STAGE_BYTES); }
  // Page n of the stage, or its block (n = 0).
  HW_DEVICE Header header(int s, int n) const {
    return shared<int32_t>(HEADERS_AT, 4 * UNIT_PAGES * MAX_STAGES).load_as<Header>(4 * (UNIT_PAGES * s + n));
  }
  HW_DEVICE void write_header(int s, int n, Header header) const {
    shared<int32_t>(HEADERS_AT, 4 * UNIT_PAGES * MAX_STAGES).store_as(4 * (UNIT_PAGES * s + n), header);
  }

  HW_DEVICE void init(int readers) const {
    if (thread() == 0) {
      for (int s = 0; s < num_stages; ++s) {
        barrier_init(full(), s, COPY_ARRIVALS + 1);
        barrier_init(empty(), s, readers);
      }
      barrier_init_fence();
    }
    block_sync();
  }
  // Waits for the bytes of a fill; returns its stage.
  HW_DEVICE int await(int fill) const {
    barrier_wait(full(), stage_of(fill), parity_of(fill));
    return stage_of(fill);
  }
  HW_DEVICE void release(int s) const {
    warp_sync();
    if (lane() == 0) barrier_arrive(empty(), s);
  }
};

// Ids, lengths and positions of 32 pages or blocks, lane n holding item first + n of the list.
struct Window {
  int first, id, len, position;

  // `before`: tokens before the first item. Items of id -1 and those after the end have no tokens.
  HW_DEVICE void fetch(const int32_t *ids, const int32_t *lens, int from, int end, int before, int limit) {
    const int item = from + lane();
    first = from;
    id = item < end ? load(ids + item) : -1;
    HW_CHECK(id < limit, "attend: a page or block id outside its arena");
    len = id >= 0 ? load(lens + item) : 0;
    int sum = len;
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
      const int other = shuffle(sum, (lane() - n) & 31);
      if (lane() >= n) sum += other;
    }
    position = before + sum - len;
  }
  HW_DEVICE int end_position() const { return shuffle(position + len, 31); }
};

// Copies what a stage needs of page `id`, of which `len` tokens are filled, and says how many bytes that is.
template <bool WITH_VALUES>
struct PageCopies {
  HW_DEVICE static int bytes(int len) { return (WITH_VALUES ? 2 : 1) * len * PAGE_ROW_BYTES; }

  HW_DEVICE static void issue(const Ring &ring, int s, Shared<uint8_t> to, const uint8_t *from, int len) {
    const int live = len * PAGE_ROW_BYTES;
    if (WITH_VALUES && len == PAGE_TOKENS) {
      copy(ring.full(), s, to, from, PAGE_BYTES);
    } else if (len > 0) {
      copy(ring.full(), s, to, from, live);
      if (WITH_VALUES) copy(ring.full(), s, to.at(PAGE_RUN_BYTES, live), from + PAGE_RUN_BYTES, live);
    }
  }
};

// The same of a block: all of it in one copy, or filled keys, their scales and the biases.
template <bool WITH_VALUES>
struct BlockCopies {
  static constexpr int SCALES = V_SCALE - K_SCALE;

  HW_DEVICE static int bytes(int len) {
    if (len == 0) return 0;
    return WITH_VALUES ? BLOCK_BYTES : len * K_ROW_BYTES + SCALES + (BLOCK_BYTES - BIAS);
  }
  HW_DEVICE static void issue(const Ring &ring, int s, Shared<uint8_t> to, const uint8_t *from, int len) {
    if (len == 0) return;
    if (WITH_VALUES) return copy(ring.full(), s, to, from, BLOCK_BYTES);
    copy(ring.full(), s, to.at(K_CODES, len * K_ROW_BYTES), from + K_CODES, len * K_ROW_BYTES);
    if (SCALES > 0) copy(ring.full(), s, to.at(K_SCALE, SCALES), from + K_SCALE, SCALES);
    copy(ring.full(), s, to.at(BIAS, BLOCK_BYTES - BIAS), from + BIAS, BLOCK_BYTES - BIAS);
  }
};

// The producer warp: fills stages with the units of one tile after the other.
template <bool WITH_VALUES>
struct Producer {
  const KvArgs &kv;
  Ring ring;
  int fill;  // the next
  int stage;

  HW_DEVICE void tile(const Tile &t) {
    const int end = t.first_unit + t.num_units;
    if (t.first_unit < t.page_units) pages(t, min_of(end, t.page_units));
    if (end > t.page_units) blocks(t, max_of(t.first_unit, t.page_units), end);
  }

 private:
  HW_DEVICE void pages(const Tile &t, int end_unit) {
    const int begin = load(kv.page_starts + t.sequence), end = load(kv.page_starts + t.sequence + 1);
    Window window;
    window.fetch(kv.page_ids, kv.page_lens, begin + t.first_unit * UNIT_PAGES, end, t.position, kv.num_pages);
    for (int unit = t.first_unit; unit < end_unit; ++unit) {
      const int item = begin + unit * UNIT_PAGES;
      if (item == window.first + 32) {
        window.fetch(kv.page_ids, kv.page_lens, item, end, window.end_position(), kv.num_pages);
      }
      page_unit(window, item - window.first, t.head);
    }
  }

  HW_DEVICE void page_unit(const Window &window, int from, int head) {
    int id[UNIT_PAGES], len[UNIT_PAGES], position[UNIT_PAGES], total = 0;
#pragma unroll
    for (int n = 0; n < UNIT_PAGES; ++n) {
      id[n] = shuffle(window.id, from + n);
      len[n] = shuffle(window.len, from + n);
      position[n] = shuffle(window.position, from + n);
      total += PageCopies<WITH_VALUES>::bytes(len[n]);
    }
    wait();
#pragma unroll
    for (int n = 0; n < UNIT_PAGES; ++n) write_header(n, {len[n], position[n], id[n], 0});
    announce(total);
#pragma unroll
    for (int n = 0; n < UNIT_PAGES; ++n) {
      const int64_t page_head = static_cast<int64_t>(id[n]) * kv.kv_heads + head;
      const Shared<uint8_t> to = ring.stage(stage).at(n * PAGE_BYTES, PAGE_BYTES);
      PageCopies<WITH_VALUES>::issue(ring, stage, to, kv.pages + page_head * PAGE_BYTES, len[n]);
    }
    finish();
  }

  HW_DEVICE void blocks(const Tile &t, int first_unit, int end_unit) {
    const int32_t *starts = kv.block_starts + t.sequence * kv.kv_heads + t.head;
    const int begin = load(starts) - t.page_units, end = load(starts + 1);
    Window window;
    window.first = begin + first_unit - 32;
    for (int unit = first_unit; unit < end_unit; ++unit) {
      const int item = begin + unit;
      if (item == window.first + 32) window.fetch(kv.block_ids, kv.block_lens, item, end, 0, kv.num_blocks);
      const int id = shuffle(window.id, item - window.first), len = shuffle(window.len, item - window.first);
      wait();
      write_header(0, {len, 0, id, 0});
      announce(BlockCopies<WITH_VALUES>::bytes(len));
      const uint8_t *from = kv.blocks + static_cast<int64_t>(id) * BLOCK_BYTES;
      BlockCopies<WITH_VALUES>::issue(ring, stage, ring.stage(stage), from, len);
      finish();
    }
  }

  HW_DEVICE void wait() {
    stage = ring.stage_of(fill);
    barrier_wait(ring.empty(), stage, ring.parity_of(fill) ^ 1);
  }
  HW_DEVICE void write_header(int n, Header header) {
    if (lane() == n) ring.write_header(stage, n, header);
  }
  // The header's own arrival: an asynchronous one does not order this warp's plain stores.
  HW_DEVICE void announce(int total) {
    warp_sync();
    if (lane() == 0) barrier_arrive(ring.full(), stage);
    copy_begin(ring.full(), stage, total);
  }
  HW_DEVICE void finish() {
    copy_end(ring.full(), stage);
    ++fill;
  }
};

// ---- rows as operands

// One lane's part of a stored row of ROW_BYTES, registers in the order of its list; zeros where the row is not filled.
// PAIRED: two neighbouring vectors belong to one run of the list (16-bit channels, R = 16).
template <int ROW_BYTES, bool PAIRED>
struct Row {
  static constexpr int VECTORS = ROW_BYTES / 64;
  static constexpr int WORDS = ROW_BYTES / 16;

  HW_DEVICE static void read(Shared<uint8_t> from, int row_at, bool filled, uint32_t (&words)[WORDS]) {
    const int t = lane() % 4;
    if constexpr (VECTORS == 0) {
      Vec<uint32_t, 2> x{0, 0};
      if (filled) x = from.load_as<Vec<uint32_t, 2>>(row_at + 8 * t);
      words[0] = x[0], words[1] = x[1];
    } else {
      const int flip = VECTORS > 1 ? lane() / 4 & 1 : 0;
      Vec<uint32_t, 4> x[VECTORS];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int from_v = v ^ flip, chunk = PAIRED ? 8 * (from_v / 2) + 2 * t + from_v % 2 : 4 * from_v + t;
        x[v] = Vec<uint32_t, 4>{0, 0, 0, 0};
        if (filled) x[v] = from.load_as<Vec<uint32_t, 4>>(row_at + 16 * chunk);
      }
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        words[w] = VECTORS == 1 ? x[0][w] : flip ? x[(w / 4 ^ 1) % VECTORS][w % 4] : x[w / 4][w % 4];
      }
    }
  }
};

template <int RUN>
using HalfRow = Row<HEAD_DIM * 2, RUN == 16>;

// Codes of two channels or two keys as fp16, exactly. `low`: bits of 1024 + code in each half.
constexpr uint32_t ONE_K = 0x64006400, BYTES_64 = 0x64646464;
HW_DEVICE uint32_t code_of(uint32_t low) { return fma2_fp16(low, 0x3c003c00, 0xe400e400); }       // x - 1024
HW_DEVICE uint32_t high_code_of(uint32_t high) { return fma2_fp16(high, 0x2c002c00, 0xd400d400); }  // x / 16 - 64
// Bytes 0, 2, 1, 3: neighbours then lie two bytes apart, where both halves of a register expect them.
HW_DEVICE uint32_t part_neighbours(uint32_t codes) { return byte_perm(codes, 0, 0x3120); }

// A lane's code words of one key's row -> fp16 pairs of its list.
template <int BITS, int RUN>
struct KeyCodes {
  static constexpr int WORDS = HEAD_DIM * BITS / 8 / 16;

  HW_DEVICE static void unpack(const uint32_t (&codes)[WORDS], uint32_t (&pairs)[LIST_PAIRS]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      if constexpr (BITS == 8) {
        pairs[2 * w] = code_of(byte_perm(codes[w], BYTES_64, 0x4140));
        pairs[2 * w + 1] = code_of(byte_perm(codes[w], BYTES_64, 0x4342));
      } else if constexpr (BITS == 4) {
        const uint32_t x = part_neighbours(codes[w]), y = x >> 8;
        pairs[2 * w] = code_of((x & 0x000f000f) | ONE_K);
        pairs[2 * w + 1] = code_of((y & 0x000f000f) | ONE_K);
        pairs[RUN / 2 + 2 * w] = high_code_of((x & 0x00f000f0) | ONE_K);
        pairs[RUN / 2 + 2 * w + 1] = high_code_of((y & 0x00f000f0) | ONE_K);
      }
    }
  }
};

// A lane's code words of one key's value row -> of 8 keys, per output tile j, the codes of keys (2t, 2t + 1) in column g.
// Collective: lane (g, t) brings the row of key g.
template <int BITS, int RUN>
struct ValueCodes {
  static constexpr int WORDS = HEAD_DIM * BITS / 8 / 16;

  HW_DEVICE static void unpack(const uint32_t (&codes)[WORDS], uint32_t (&columns)[LIST_PAIRS]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const uint32_t x = transpose_8x8(part_neighbours(codes[w])), y = x >> 8;
      if constexpr (BITS == 8) {
        columns[2 * w] = code_of(byte_perm(x, BYTES_64, 0x4240));
        columns[2 * w + 1] = code_of(byte_perm(x, BYTES_64, 0x4341));
      } else if constexpr (BITS == 4) {
        columns[2 * w] = code_of((x & 0x000f000f) | ONE_K);
        columns[2 * w + 1] = code_of((y & 0x000f000f) | ONE_K);
        columns[RUN / 2 + 2 * w] = high_code_of((x & 0x00f000f0) | ONE_K);
        columns[RUN / 2 + 2 * w + 1] = high_code_of((y & 0x00f000f0) | ONE_K);
      }
    }
  }
};

// fp16 fields of the channels of a lane's list, of one quantized block: `at` is K_SCALE or K_MIN.
struct ChannelField {
  uint32_t pairs[LIST_PAIRS];

  HW_DEVICE void read(Shared<uint8_t> block, int at) {
    if constexpr (QUANTIZED) HalfRow<K_RUN>::read(block, at, true, pairs);
  }
};

// Keys of 8 tokens of a page as the second operand: the register pair of step s is pairs[2s], pairs[2s + 1].
HW_DEVICE void page_keys(Shared<uint8_t> stage, int first_at, int filled, uint32_t (&pairs)[LIST_PAIRS]) {
  const int g = lane() / 4;
  HalfRow<K_RUN>::read(stage, first_at + g * PAGE_ROW_BYTES, g < filled, pairs);
}

// The same of 8 entries of a block; fp16 if the block is quantized: codes times scale, plus minimum.
HW_DEVICE void block_keys(Shared<uint8_t> stage, int first, int filled, const ChannelField &scale,
                          const ChannelField &minimum, uint32_t (&pairs)[LIST_PAIRS]) {
  const int g = lane() / 4, row_at = K_CODES + (first + g) * K_ROW_BYTES;
  if constexpr (QUANTIZED) {
    uint32_t codes[K_ROW_BYTES / 16];
    Row<K_ROW_BYTES, false>::read(stage, row_at, g < filled, codes);
    KeyCodes<K_BITS, K_RUN>::unpack(codes, pairs);
#pragma unroll
    for (int j = 0; j < LIST_PAIRS; ++j) pairs[j] = fma2_fp16(pairs[j], scale.pairs[j], minimum.pairs[j]);
  } else {
    HalfRow<K_RUN>::read(stage, row_at, g < filled, pairs);
  }
}

// Logits of entries get their bias: of keys (2t, 2t + 1) of 8 entries, in units of log2.
HW_DEVICE Vec<float, 2> block_bias(Shared<uint8_t> stage, int first) {
  const Vec<Fp16, 2> bias = stage.load_as<Vec<Fp16, 2>>(BIAS + 2 * (first + 2 * (lane() % 4)));
  return {to_float(bias[0]) * LOG2E, to_float(bias[1]) * LOG2E};
}

// ---- queries

// Query rows in shared memory, [rows][HEAD_DIM]: row m of a tile is query head m % group of its row m / group. Each row is
// scaled by the power of two that brings its largest element under 1, which is exact; `factor` takes it back.
struct QueryRows {
  int num_rows;

  HW_DEVICE Shared<uint8_t> pages() const { return shared<uint8_t>(QUERY_AT, num_rows * PAGE_ROW_BYTES); }
  // For quantized blocks: fp16.
  HW_DEVICE Shared<uint8_t> codes() const { return shared<uint8_t>(QUERY_CODES_AT, num_rows * PAGE_ROW_BYTES); }
  HW_DEVICE Shared<float> factor() const { return shared<float>(FACTORS_AT, num_rows); }

  // One warp writes row m, `from` in global memory or null for a row of zeros. logit = factor * (q . k), in log2.
  HW_DEVICE void write(int m, const Half *from, float scale) const {
    constexpr int PAIRS = HEAD_DIM / 64;
    using Pairs = Vec<uint32_t, PAIRS>;
    float x[2 * PAIRS], top = 0.0f;
    Pairs raw = from ? load(reinterpret_cast<const Pairs *>(from) + lane()) : Pairs{};
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const Vec<float, 2> pair = unpack2(raw[i]);
      x[2 * i] = pair[0], x[2 * i + 1] = pair[1];
      top = max_of(top, max_of(max_of(pair[0], -pair[0]), max_of(pair[1], -pair[1])));
    }
#pragma unroll
    for (int n = 1; n < 32; n *= 2) top = max_of(top, shuffle_xor(top, n));
    // 2^e > top >= 2^(e - 1), from the bits of fp32.
    const int exponent = min_of(static_cast<int>(bit_cast<uint32_t>(top) >> 23) + 1, 253);
    const float shrink = bit_cast<float>(static_cast<uint32_t>(254 - exponent) << 23);
    Pairs scaled, codes;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      scaled[i] = pack2(x[2 * i] * shrink, x[2 * i + 1] * shrink);
      codes[i] = pack2_fp16(x[2 * i] * shrink, x[2 * i + 1] * shrink);
    }
    const int at = m * PAGE_ROW_BYTES + lane() * static_cast<int>(sizeof(Pairs));
    pages().store_as(at, scaled);
    if (QUERY_CODES_AT != QUERY_AT) this->codes().store_as(at, codes);
    if (lane() == 0) factor().store(m, scale * LOG2E * bit_cast<float>(static_cast<uint32_t>(exponent) << 23));
  }

  // The first operand of 16 rows from `first` on, step by step over the list.
  HW_DEVICE static void read(Shared<uint8_t> rows, int first, FragmentA (&q)[CHANNEL_STEPS]) {
    const int g = lane() / 4;
    uint32_t low[LIST_PAIRS], high[LIST_PAIRS];
    HalfRow<K_RUN>::read(rows, (first + g) * PAGE_ROW_BYTES, true, low);
    HalfRow<K_RUN>::read(rows, (first + g + 8) * PAGE_ROW_BYTES, true, high);
#pragma unroll
    for (int s = 0; s < CHANNEL_STEPS; ++s) {
      q[s] = FragmentA{{low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1]}};
    }
  }
};

// c += q . k for 16 rows and 8 keys, channel by channel of the lists. FP16: operands are fp16 whatever ELEMENT is.
template <bool FP16>
HW_DEVICE void dot(FragmentC &c, const FragmentA (&q)[CHANNEL_STEPS], const uint32_t (&pairs)[LIST_PAIRS]) {
#pragma unroll
  for (int s = 0; s < CHANNEL_STEPS; ++s) {
    const FragmentB b{{pairs[2 * s], pairs[2 * s + 1]}};
    if constexpr (FP16) {
      mma_fp16(c, q[s], b);
    } else {
      mma(c, q[s], b);
    }
  }
}

}  // namespace
