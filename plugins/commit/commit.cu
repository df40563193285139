// `commit`: the second half of a commit transition, all rows (layer, KV head) of one conversation in one launch.
//
//   reads   staged tokens' K and V from pages, dissolved blocks, keys of blocks that stay; decisions of the line
//   writes  new blocks and their scores, merged entries of blocks that stay, moved tokens, counts of absorbed, dropped
//
// Shapes stand in commit_params.cuh, the meaning in plugins/commit/{publish,reference}.py. Called by commit/cuda.py and
// the TensorRT plugin, once per commit. A block of the launch takes rows in turn and works alone on each:
//   1. lists   which entries are kept, which lie below the line (commit_lists.cuh)
//   2. keys    bulk copies bring K; nearest candidate of every key below; K of new blocks (commit_keys, commit_search)
//   3. values  bulk copies bring V; merge, quantize, write (commit_values.cuh)
//   4. moves   protected tokens go from slot to slot
// Rows share no memory that one of them writes: new blocks and slots moved to are in no other table (cuda.py refuses a
// plan where they are). A row reads what it merges into before it writes it.
//
// Bytes, at least (traffic.py): K of kept tokens, and with a gate K of those below and of blocks that stay; V of kept
// and absorbed entries; the new blocks. Each moves once while the keys below the line fit query_rows; each further slab
// of query_rows reads the candidates' keys once more (out of L2 as a rule: a row's keys are at most a few MB). With a
// gate the work grows with kept x below: a long span is bound by tensor cores, not by bytes.
#include "commit/commit_search.cuh"
#include "commit/commit_values.cuh"

namespace commit {

// The ring of stages: copies started and copies taken so far, those of keys below the line apart.
struct Ring {
  int num_stages;
  int copied = 0, taken = 0, slabs = 0;

  // The stage that the next copies go to, and the one that has arrived when `wait` returns.
  HW_DEVICE int fill() { return copied++ % num_stages; }
  HW_DEVICE int wait(Barriers bars) {
    const int stage = taken % num_stages;
    barrier_wait(bars, stage, taken++ / num_stages % 2);
    return stage;
  }
};

// One tile that has arrived: searched by the slab, and written if it is a new block met for the first time.
HW_DEVICE void work_on_tile(const Row &row, const KeyViews &v, const Slab &slab, const Tile &tile, int from) {
  const Shared<uint8_t> stage = v.stage(from);
  const bool writes = tile.is_new && slab.first == 0;
  if (slab.count > 0) open_tile(row, v, tile, stage);
  if (writes && QUANTIZED) take_range(row, v, tile, stage);
  if (writes && warp() == 0) bulk_store_wait();  // the image has left
  block_sync();
  if (writes) {
    encode_keys(row, v, tile, stage);
    fence_async();
  }
  if (slab.count > 0) search(row, v, slab, tile);
  block_sync();
  if (writes && warp() == 0) store_keys(row, v, tile.number);
}

// One pass over all candidates for one slab of keys below the line (count 0: nothing to search, K is written only).
// `ahead` is the tile whose copies start next: num_stages - 1 before the one at work.
HW_DEVICE void stream_tiles(const Row &row, const KeyViews &v, const Slab &slab, Ring &ring) {
  const bool searches = slab.count > 0;
  Tile tile = tile_of(row, searches, 0), ahead = tile;
  copy_slab(row, v, slab);
  for (int i = 0; i < ring.num_stages - 1 && ahead.count > 0; ++i) {
    copy_tile(row, v, ahead, ring.fill());
    ahead = tile_of(row, searches, ahead.number + 1);
  }
  barrier_wait(v.bars, QUERY_BARRIER, ring.slabs++ % 2);
  open_slab(row, v, slab);
  fence_async();  // later copies take the place of what was written here
  block_sync();
  for (; tile.count > 0; tile = tile_of(row, searches, tile.number + 1)) {
    if (ahead.count > 0) {
      copy_tile(row, v, ahead, ring.fill());
      ahead = tile_of(row, searches, ahead.number + 1);
    }
    work_on_tile(row, v, slab, tile, ring.wait(v.bars));
  }
}

HW_DEVICE void work_on_keys(const Row &row, Ring &ring) {
  const KeyViews v(row.p);
  if (row.p.absorb == 0 || row.below == 0) return stream_tiles(row, v, {0, 0, 0}, ring);
  for (int first = 0; first < row.below;) {
    const Slab slab = next_slab(row, first);
    stream_tiles(row, v, slab, ring);
    first += slab.count;
  }
}

// One chunk that has arrived; the last of a group finishes it.
HW_DEVICE void work_on_chunk(const Row &row, const ValueViews &v, const Chunk &chunk, int from) {
  add_chunk(row, v, chunk, v.stage(from));
  const bool is_new = chunk.group < row.num_new;
  if (chunk.last && !is_new) rewrite_group(row, v, chunk.group);
  if (chunk.last && is_new) {
    if (warp() == 0) bulk_store_wait();  // the image has left
    block_sync();
    encode_group(row, v, chunk.group);
    fence_async();
  }
  block_sync();
  if (chunk.last && is_new && warp() == 0) store_group(row, v, chunk.group);
}

HW_DEVICE void work_on_values(const Row &row, Ring &ring) {
  const ValueViews v(row.p);
  Chunk chunk = chunk_from(row, 0, 0), ahead = chunk;
  for (int i = 0; i < ring.num_stages - 1 && ahead.count > 0; ++i) {
    copy_chunk(row, v, ahead, ring.fill());
    ahead = next_chunk(row, ahead);
  }
  for (; chunk.count > 0; chunk = next_chunk(row, chunk)) {
    if (ahead.count > 0) {
      copy_chunk(row, v, ahead, ring.fill());
      ahead = next_chunk(row, ahead);
    }
    work_on_chunk(row, v, chunk, ring.wait(v.bars));
  }
}

// Copies K, V and seen of protected tokens of the row's head, a token per warp.
HW_DEVICE void move_tokens(const Row &row) {
  using Piece = Vec<uint32_t, 4>;
  constexpr int PIECES = HALF_ROW / 16;  // of K, then as many of V
  const CommitParams &p = row.p;
  Fp16 *seen = reinterpret_cast<Fp16 *>(load(p.layer_seen + row.index / p.kv_heads));
  for (int i = warp(); i < p.num_moves; i += WARPS) {
    const int from = load(p.move_from + i), to = load(p.move_to + i);
    if (from < 0 || to < 0) continue;
    if (lane() < 2 * PIECES) {
      const int kv = lane() / PIECES, piece = lane() % PIECES;
      const Piece *source = reinterpret_cast<const Piece *>(token_row(row, from, kv));
      store(reinterpret_cast<Piece *>(const_cast<Half *>(token_row(row, to, kv))) + piece, load(source + piece));
    }
    if (lane() != 0) continue;
    const int64_t source = (static_cast<int64_t>(from / PAGE_TOKENS) * p.kv_heads + row.head) * PAGE_TOKENS;
    const int64_t target = (static_cast<int64_t>(to / PAGE_TOKENS) * p.kv_heads + row.head) * PAGE_TOKENS;
    store(seen + target + to % PAGE_TOKENS, load(seen + source + from % PAGE_TOKENS));
  }
}

}  // namespace commit

// Copies lane by lane (no bulk unit) take more registers, and those GPUs have less shared memory.
HW_KERNEL(commit_rows, commit::CommitParams, commit::THREADS, hw::COPY_ARRIVALS == 1 ? 2 : 1) {
  using namespace commit;
  HW_CHECK(num_threads() == THREADS && p.num_stages <= MAX_STAGES, "commit: launched with other threads or stages");
  const Barriers bars = barriers(p.at_barriers, BARRIERS);
  if (thread() == 0) {
    for (int i = 0; i < BARRIERS; ++i) barrier_init(bars, i, COPY_ARRIVALS * WARPS);
    barrier_init_fence();
  }
  block_sync();
  Ring ring = {p.num_stages};
  for (int index = block(); index < p.num_rows; index += num_blocks()) {
    Row row = open_row(p, index);
    list_moving(row);
    work_on_keys(row, ring);
    list_members(row);
    work_on_values(row, ring);
    move_tokens(row);
    block_sync();
  }
  if (warp() == 0) bulk_store_wait();
}
