// What `attend` and `score` share: how keys and values come on chip. How a warp reads them there: kv_rows.cuh.
//
// UNITS. The KV of one (sequence, KV head) is a list of units: first its pages, UNIT_PAGES at a time, then its
// committed blocks, one each. A unit fills one stage of a ring in shared memory, STAGE_BYTES long: pages
// [UNIT_PAGES, {K, V}, PAGE_TOKENS, HEAD_DIM], or a block as layout.py lays it out. A full page is one copy, since its
// K and V are neighbours; of a part-filled page the filled rows of K and of V are two, and nothing else is read. Lane n
// of the producer warp knows page or block n of the next 32, so that the tables cost one round trip to memory per 32
// ids; the ring is deeper than that round trip.
//
// STAGES. A full barrier completes when the bytes and the stage's header (filled tokens and first position of each
// page) are there; empty[s] when the warps that read the stage are done. Stages are used in turn, tile after tile, so
// the producer runs ahead of the consumers across tiles.
// Copies overtake each other, and a wait tells phases apart by their parity only: a warp that waits for a phase of a
// barrier must have seen the one before. So full barriers are not those of stages but MAX_STAGES in turn, a multiple of
// the warps that take units in turn: each meets its own ones again and again, whatever the number of stages.
#pragma once

#include "hw.cuh"

namespace {

using namespace hw;

constexpr int PAGE_ROW_BYTES = HEAD_DIM * 2;
constexpr int PAGE_RUN_BYTES = PAGE_TOKENS * PAGE_ROW_BYTES;  // K or V of one (page, head)
constexpr int PAGE_BYTES = 2 * PAGE_RUN_BYTES;
constexpr int K_ROW_BYTES = HEAD_DIM * K_BITS / 8;  // of a block
constexpr int V_ROW_BYTES = HEAD_DIM * V_BITS / 8;
constexpr int KV_THREADS = 32 * (NUM_CONSUMERS + 1);  // NUM_CONSUMERS warps compute, the one after them copies
constexpr int STEP_KEYS = 16;                         // keys that a warp handles at a time, as two tiles of 8
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float LOWEST = -1e30f;  // a running maximum before any key; finite, so that differences stay numbers
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "head_dim");
static_assert(PAGE_TOKENS % 8 == 0 && BLOCK_ENTRIES % 8 == 0, "tiles of 8 keys");
static_assert(UNIT_KEYS % STEP_KEYS == 0, "steps of 16 keys");
static_assert(MAX_STAGES % NUM_CONSUMERS == 0, "a full barrier belongs to one warp of those that take units in turn");

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
  bool squares;  // weights of its rows are added up by their squares (RECORD_SQUARES)
};

HW_DEVICE Tile load_tile(const int32_t *tiles, int i) {
  const Vec<int32_t, 4> *from = reinterpret_cast<const Vec<int32_t, 4> *>(tiles + static_cast<int64_t>(i) * TILE_INTS);
  Vec<int32_t, 4> f[TILE_INTS / 4];
#pragma unroll
  for (int n = 0; n < TILE_INTS / 4; ++n) f[n] = load(from + n);
#define TILE_FIELD(n) f[(n) / 4][(n) % 4]
  const int split = TILE_FIELD(TILE_FIRST_SPLIT);
  return {TILE_FIELD(TILE_SEQUENCE),    TILE_FIELD(TILE_HEAD),       TILE_FIELD(TILE_FIRST_ROW),
          TILE_FIELD(TILE_NUM_ROWS),    TILE_FIELD(TILE_FIRST_UNIT), TILE_FIELD(TILE_NUM_UNITS),
          TILE_FIELD(TILE_PAGE_UNITS),  TILE_FIELD(TILE_POSITION),   TILE_FIELD(TILE_PAGE_TOKENS),
          split < 0 ? ~split : split,   TILE_FIELD(TILE_NUM_SPLITS), TILE_FIELD(TILE_LOGITS),
          split < 0};
#undef TILE_FIELD
}

// What `place` becomes when weights join it whose squares add up to `sum`: the norm of all; infinite places stay so.
// A plain write, since one thread of a launch has the place: a sequence's (head, unit) is in one tile of those that
// record, and sequences that share pages or blocks must not add squares in one launch (one probe runs at a time).
HW_DEVICE void add_squares(Fp16 *place, float before, float sum) {
  store(place, from_float<Fp16>(fast_sqrt(before * before + sum)));
}

// ---- the ring

// filled: tokens or entries; position: of the first among the sequence's page tokens.
struct alignas(16) Header {
  int32_t filled, position, id, unused;
};

struct Ring {
  int num_stages;

  // Fills are counted over all tiles of a block; a stage takes every num_stages-th. Unsigned division takes fewer
  // registers.
  HW_DEVICE int stage_of(int fill) const { return static_cast<uint32_t>(fill) % num_stages; }
  HW_DEVICE int parity_of(int fill) const { return static_cast<uint32_t>(fill) / num_stages & 1; }
  // The full barrier of a fill.
  HW_DEVICE static int arrival_of(int fill) { return static_cast<uint32_t>(fill) % MAX_STAGES; }
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
      for (int i = 0; i < MAX_STAGES; ++i) barrier_init(full(), i, COPY_ARRIVALS + 1);
      for (int s = 0; s < num_stages; ++s) barrier_init(empty(), s, readers);
      barrier_init_fence();
    }
    block_sync();
  }
  // Waits for the bytes of a fill; returns its stage.
  HW_DEVICE int await(int fill) const {
    barrier_wait(full(), arrival_of(fill), static_cast<uint32_t>(fill) / MAX_STAGES & 1);
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

// Copies what a stage needs of a page, of which `len` tokens are filled, and says how many bytes that is.
// i: the fill's full barrier.
template <bool WITH_VALUES>
struct PageCopies {
  HW_DEVICE static int bytes(int len) { return (WITH_VALUES ? 2 : 1) * len * PAGE_ROW_BYTES; }

  HW_DEVICE static void issue(Barriers full, int i, Shared<uint8_t> to, const uint8_t *from, int len) {
    const int live = len * PAGE_ROW_BYTES;
    if (WITH_VALUES && len == PAGE_TOKENS) {
      copy(full, i, to, from, PAGE_BYTES);
    } else if (len > 0) {
      copy(full, i, to, from, live);
      if (WITH_VALUES) copy(full, i, to.at(PAGE_RUN_BYTES, live), from + PAGE_RUN_BYTES, live);
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
  HW_DEVICE static void issue(Barriers full, int i, Shared<uint8_t> to, const uint8_t *from, int len) {
    if (len == 0) return;
    if (WITH_VALUES) return copy(full, i, to, from, BLOCK_BYTES);
    copy(full, i, to.at(K_CODES, len * K_ROW_BYTES), from + K_CODES, len * K_ROW_BYTES);
    if (SCALES > 0) copy(full, i, to.at(K_SCALE, SCALES), from + K_SCALE, SCALES);
    copy(full, i, to.at(BIAS, BLOCK_BYTES - BIAS), from + BIAS, BLOCK_BYTES - BIAS);
  }
};

// The producer warp: fills stages with the units of one tile after the other.
template <bool WITH_VALUES>
struct Producer {
  const KvArgs &kv;
  Ring ring;
  int fill;            // the next
  int stage, arrival;  // its stage and full barrier

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
      PageCopies<WITH_VALUES>::issue(ring.full(), arrival, to, kv.pages + page_head * PAGE_BYTES, len[n]);
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
      BlockCopies<WITH_VALUES>::issue(ring.full(), arrival, ring.stage(stage), from, len);
      finish();
    }
  }

  HW_DEVICE void wait() {
    stage = ring.stage_of(fill), arrival = Ring::arrival_of(fill);
    barrier_wait(ring.empty(), stage, ring.parity_of(fill) ^ 1);
  }
  HW_DEVICE void write_header(int n, Header header) {
    if (lane() == n) ring.write_header(stage, n, header);
  }
  // The header's own arrival: an asynchronous one does not order this warp's plain stores.
  HW_DEVICE void announce(int total) {
    warp_sync();
    if (lane() == 0) barrier_arrive(ring.full(), arrival);
    copy_begin(ring.full(), arrival, total);
  }
  HW_DEVICE void finish() {
    copy_end(ring.full(), arrival);
    ++fill;
  }
};

}  // namespace
