// Threads exchange values through shared memory, then one warp stores the result in bulk.
// out [num_blocks, THREADS] int32 = in, with its rows reversed, plus the largest value of each aligned run of 32;
// total [1] int32 = sum of the runs' largest values over all blocks; peak [1] fp16 = largest value / 1024.
//
// Params.bug plants one mistake; NONE is the correct kernel.
#include "hw.cuh"

using namespace hw;

enum Bug {
  NONE,
  NO_BLOCK_SYNC,
  NAMED_SYNC_OTHER_COUNT,
  WARP_SKIPS_SYNC,
  NO_FENCE_ASYNC,
  NO_STORE_WAIT,
  WRITE_BEFORE_STORE_WAIT,
  VIEW_OVERRUN,
  MISALIGNED_SHARED_VECTOR,
  MISALIGNED_GLOBAL_VECTOR,
  NULL_POINTER,
  STORE_OF_UNWRITTEN,
  NO_WARP_SYNC,
  NEGATIVE_ATOMIC_MAX,
  CHECK_FAILS,
  SYNC_OF_PART_OF_A_WARP,
  NO_SYNC_BEFORE_STORE,
  LANE_ENDS_EARLY,
  SHUFFLE_OUTSIDE,
};

struct Params {
  const int *in;
  int *out;
  int *total;
  Fp16 *peak;
  int bug;
};

constexpr int THREADS = 96, BYTES = THREADS * 4;
// Bytes of shared memory: values [0, BYTES), result [BYTES, 2 * BYTES).

HW_DEVICE int largest_of_warp(int x) {
  for (int distance = 16; distance > 0; distance /= 2) x = max_of(x, shuffle_xor(x, distance));
  return x;
}

HW_DEVICE void sync_all(const Params &p) {
  if (p.bug == WARP_SKIPS_SYNC && warp() == 2) return;
  if (p.bug == SYNC_OF_PART_OF_A_WARP) {
    named_sync(1, THREADS - 16);
  } else {
    named_sync(1, p.bug == NAMED_SYNC_OTHER_COUNT && warp() == 1 ? 64 : THREADS);
  }
}

HW_KERNEL(exchange, Params, THREADS, 1) {
  const int i = thread();
  const Shared<int> values = shared<int>(0, THREADS), result = shared<int>(BYTES, THREADS);
  HW_CHECK(!(p.bug == CHECK_FAILS && i == 5), "thread 5 is not welcome");
  if (p.bug == LANE_ENDS_EARLY && i == 70) return;
  if (p.bug == MISALIGNED_GLOBAL_VECTOR) load(reinterpret_cast<const Vec<int, 2> *>(p.in + 1));
  if (p.bug == NULL_POINTER) load(static_cast<const int *>(nullptr) + i);
  if (p.bug == MISALIGNED_SHARED_VECTOR && i == 0) values.store_as(1, Vec<int, 2>{{0, 0}});
  values.store(i, load(p.in + block() * THREADS + i));
  if (p.bug != NO_BLOCK_SYNC) block_sync();
  const int mine = values.load(THREADS - (p.bug == VIEW_OVERRUN ? 0 : 1) - i);
  const int largest = largest_of_warp(values.load(i));
  if (p.bug == SHUFFLE_OUTSIDE) shuffle(mine, 32);
  if (!(p.bug == STORE_OF_UNWRITTEN && i == 17)) result.store(i, mine + largest);
  if (p.bug == NO_WARP_SYNC) result.load(i ^ 1);
  if (p.bug != NO_FENCE_ASYNC) fence_async();
  if (p.bug != NO_SYNC_BEFORE_STORE) sync_all(p);
  if (warp() == 0) {
    bulk_store(p.out + block() * THREADS, result.cast<uint8_t>(), BYTES);
    if (p.bug == WRITE_BEFORE_STORE_WAIT) result.store(i, 0);
    if (p.bug != NO_STORE_WAIT) bulk_store_wait();
    result.store(i, 0);
  }
  if (lane() == 0) atomic_add(p.total, largest);
  atomic_max(p.peak, (p.bug == NEGATIVE_ATOMIC_MAX ? -1.0f : 1.0f) * static_cast<float>(largest) / 1024.0f);
}
