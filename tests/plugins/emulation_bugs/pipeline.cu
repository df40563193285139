// A producer warp and consumer warps over a ring of two stages, with an mma: what attend does, as small as can be.
// out [num_blocks, tiles, 16, 8] fp32 = a [16, 16] times each tile [16, 8] of b [num_blocks, tiles, 16, 8].
//
// Params.bug plants one mistake; NONE is the correct kernel.
#include "hw.cuh"

using namespace hw;

enum Bug {
  NONE,
  NO_SYNC_AFTER_INIT,
  NO_INIT_FENCE,
  TOO_FEW_BYTES_ANNOUNCED,
  MISALIGNED_SOURCE,
  MISALIGNED_DESTINATION,
  ODD_COPY_SIZE,
  WRONG_PHASE_CONSUMER,
  WRONG_PHASE_PRODUCER,
  NO_WAIT_FOR_EMPTY,
  NO_WAIT_FOR_FULL,
  STAGE_OVERRUN,
  A_ROW_NEVER_WRITTEN,
  TOO_FEW_ARRIVALS_COUNTED,
  ARRIVAL_MISSING,
  ARRIVAL_TWICE,
  NO_WARP_SYNC_BEFORE_ARRIVAL,
  DIVERGENT_MMA,
  NO_COPY_END,
  COPY_OVER_COPY,
  NO_WAIT_AT_END,
  BARRIER_OVERWRITTEN,
  BARRIER_NOT_INITIALISED,
  NO_FENCE_BEFORE_COPY,
};

struct Params {
  const Half *a;
  const Half *b;
  float *out;
  int tiles;
  int bug;
};

constexpr int STAGES = 2, CONSUMERS = 2;
constexpr int THREADS = 32 * (CONSUMERS + 1);
constexpr int TILE = 16 * 8, TILE_BYTES = TILE * 2;
// Bytes of shared memory: barriers [0, 32), a [64, 576), stages of b from 576.
constexpr int A_AT = 64, B_AT = A_AT + 512;

HW_DEVICE Shared<uint8_t> stage_bytes(const Params &p, int stage) {
  return shared<uint8_t>(B_AT + stage * TILE_BYTES + (p.bug == MISALIGNED_DESTINATION ? 8 : 0), TILE_BYTES);
}

HW_DEVICE void produce(const Params &p, Barriers full, Barriers empty) {
  for (int tile = 0; tile < p.tiles; ++tile) {
    const int stage = tile % STAGES, round = tile / STAGES;
    if (p.bug != NO_WAIT_FOR_EMPTY) barrier_wait(empty, stage, (round & 1) ^ (p.bug == WRONG_PHASE_PRODUCER ? 0 : 1));
    const Half *from =
        p.b + (static_cast<int64_t>(block()) * p.tiles + tile) * TILE + (p.bug == MISALIGNED_SOURCE ? 1 : 0);
    const int bytes = p.bug == ODD_COPY_SIZE ? TILE_BYTES - 8 : TILE_BYTES;
    copy_begin(full, stage, p.bug == TOO_FEW_BYTES_ANNOUNCED ? bytes - 16 : bytes);
    copy(full, stage, stage_bytes(p, p.bug == STAGE_OVERRUN ? tile % (STAGES + 1) : stage), from, bytes);
    if (p.bug == COPY_OVER_COPY) copy(full, stage, stage_bytes(p, stage), from, bytes);
    if (p.bug != NO_COPY_END) copy_end(full, stage);
  }
}

HW_DEVICE void consume(const Params &p, Barriers full, Barriers empty, int consumer) {
  const Shared<Half> a = shared<Half>(A_AT, 256);
  const Vec<uint32_t, 4> rows = ldmatrix_x4(a, (lane() % 16) * 16 + lane() / 16 * 8);
  const FragmentA left = {{rows[0], rows[1], rows[2], rows[3]}};
  for (int tile = 0; tile < p.tiles; ++tile) {
    const int stage = tile % STAGES, round = tile / STAGES;
    if (p.bug != NO_WAIT_FOR_FULL) barrier_wait(full, stage, (round & 1) ^ (p.bug == WRONG_PHASE_CONSUMER ? 1 : 0));
    const Vec<uint32_t, 2> columns = ldmatrix_x2_trans(stage_bytes(p, stage).cast<Half>(), lane() % 16 * 8);
    if (p.bug != NO_WARP_SYNC_BEFORE_ARRIVAL) warp_sync();
    if (lane() == 0 && !(p.bug == ARRIVAL_MISSING && consumer == 1)) barrier_arrive(empty, stage);
    if (p.bug == ARRIVAL_TWICE && lane() == 0 && consumer == 1) barrier_arrive(empty, stage);
    if (tile % CONSUMERS != consumer || (p.bug == DIVERGENT_MMA && lane() > 15)) continue;
    FragmentC c = {};
    mma(c, left, {{columns[0], columns[1]}});
    float *to = p.out + (static_cast<int64_t>(block()) * p.tiles + tile) * TILE + lane() / 4 * 8 + lane() % 4 * 2;
    store(reinterpret_cast<Vec<float, 2> *>(to), {c.r[0], c.r[1]});
    store(reinterpret_cast<Vec<float, 2> *>(to + 64), {c.r[2], c.r[3]});
  }
}

// The bulk unit may write where threads stored, once they fenced.
HW_DEVICE void clear_stages(const Params &p) {
  const Shared<float> stages = shared<float>(B_AT, STAGES * TILE_BYTES / 4);
  for (int i = thread(); i < STAGES * TILE_BYTES / 4; i += THREADS) stages.store(i, 0);
  if (p.bug != NO_FENCE_BEFORE_COPY) fence_async();
}

HW_KERNEL(pipeline, Params, THREADS, 1) {
  const Barriers full = barriers(0, STAGES), empty = barriers(8 * STAGES, STAGES);
  if (thread() == 0) {
    for (int stage = 0; stage < (p.bug == BARRIER_NOT_INITIALISED ? 1 : STAGES); ++stage) {
      barrier_init(full, stage, COPY_ARRIVALS);
      barrier_init(empty, stage, p.bug == TOO_FEW_ARRIVALS_COUNTED ? 1 : CONSUMERS);
    }
    if (p.bug != NO_INIT_FENCE) barrier_init_fence();
  }
  if (thread() < (p.bug == A_ROW_NEVER_WRITTEN ? 30 : 32)) {
    shared<Half>(A_AT, 256).store_as(thread() * 8, load(reinterpret_cast<const Vec<uint32_t, 4> *>(p.a) + thread()));
  }
  clear_stages(p);
  if (p.bug == NO_SYNC_AFTER_INIT) {
    named_sync(1 + warp(), 32);  // each warp alone
  } else {
    block_sync();
  }
  if (p.bug == BARRIER_OVERWRITTEN && thread() == 40) shared<uint32_t>(0, 2).store(1, 0);
  if (warp() == CONSUMERS) {
    produce(p, full, empty);
  } else if (p.bug != NO_WAIT_AT_END) {
    consume(p, full, empty, warp());
  }
}
