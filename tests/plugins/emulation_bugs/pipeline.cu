// A producer warp and consumer warps over two stages, with an mma: the smallest kernel that uses what attend uses.
// out [num_blocks, tiles, 16, 8] fp32 = a [16, 16] times each tile [16, 8] of b [num_blocks, tiles, 16, 8].
//
// BUG plants one mistake; 0 is the correct kernel.
#include "hw.cuh"

#ifndef BUG
#define BUG 0
#endif

using namespace hw;

struct Params {
  const Half *a;
  const Half *b;
  float *out;
  int tiles;
};

constexpr int STAGES = 2, CONSUMERS = 2;
constexpr int THREADS = 32 * (CONSUMERS + 1);
constexpr int TILE = 16 * 8, TILE_BYTES = TILE * 2;
// Shared memory: barriers, a, stages of b.
constexpr int A_AT = 64, B_AT = A_AT + 512, SHARED_BYTES = B_AT + STAGES * TILE_BYTES;

HW_DEVICE void produce(const Params &p, Barriers full, Barriers empty) {
  for (int tile = 0; tile < p.tiles; ++tile) {
    const int stage = tile % STAGES, round = tile / STAGES;
    barrier_wait(empty, stage, (round & 1) ^ 1);
    copy_begin(full, stage, TILE_BYTES);
    copy(full, stage, shared<uint8_t>(B_AT + stage * TILE_BYTES, TILE_BYTES),
         p.b + (static_cast<int64_t>(block()) * p.tiles + tile) * TILE, TILE_BYTES);
    copy_end(full, stage);
  }
}

HW_DEVICE void consume(const Params &p, Barriers full, Barriers empty, int consumer) {
  const Shared<Half> a = shared<Half>(A_AT, 256);
  const Vec<uint32_t, 4> rows = ldmatrix_x4(a, (lane() % 16) * 16 + lane() / 16 * 8);
  const FragmentA left = {{rows[0], rows[1], rows[2], rows[3]}};
  for (int tile = 0; tile < p.tiles; ++tile) {
    const int stage = tile % STAGES, round = tile / STAGES;
    barrier_wait(full, stage, round & 1);
    const Shared<Half> b = shared<Half>(B_AT + stage * TILE_BYTES, TILE);
    const Vec<uint32_t, 2> columns = ldmatrix_x2_trans(b, lane() % 16 * 8);
    warp_sync();
    if (lane() == 0) barrier_arrive(empty, stage);
    if (tile % CONSUMERS != consumer) continue;
    FragmentC c = {};
    mma(c, left, {{columns[0], columns[1]}});
    float *to = p.out + (static_cast<int64_t>(block()) * p.tiles + tile) * TILE + lane() / 4 * 8 + lane() % 4 * 2;
    store(reinterpret_cast<Vec<float, 2> *>(to), {c.r[0], c.r[1]});
    store(reinterpret_cast<Vec<float, 2> *>(to + 64), {c.r[2], c.r[3]});
  }
}

HW_KERNEL(pipeline, Params, THREADS, 1) {
  const Barriers full = barriers(0, STAGES), empty = barriers(8 * STAGES, STAGES);
  if (thread() == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full, stage, COPY_ARRIVALS);
      barrier_init(empty, stage, CONSUMERS);
    }
    barrier_init_fence();
  }
  if (thread() < 32) {
    shared<Half>(A_AT, 256).store_as(thread() * 8, load(reinterpret_cast<const Vec<uint32_t, 4> *>(p.a) + thread()));
  }
  block_sync();
  if (warp() == CONSUMERS) {
    produce(p, full, empty);
  } else {
    consume(p, full, empty, warp());
  }
  block_sync();
}
