// State of a block while it runs: threads, warps, barriers, copies under way. Part of machine.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fiber.hpp"
#include "machine.hpp"
#include "shared_memory.hpp"

namespace hw::emulation {

constexpr int COPY_PIECE = 16;  // bytes

enum class LaneState {
  Ready,
  AtWord,   // arrived at a warp-collective word before other lanes
  Waiting,  // for a phase of an mbarrier
  Storing,  // for the warp's bulk stores
  Ended,
};

struct Warp;

struct Lane {
  Fiber fiber;
  Identity identity;
  Warp *warp = nullptr;
  LaneState state = LaneState::Ready;
  int wait_barrier = 0, wait_parity = 0;  // while Waiting
  uint64_t last_due = 0;                  // when this lane's latest asynchronous copy is delivered
  Known known;                            // steps this thread has seen of every thread and barrier, its own included
  Step fenced = 0;                        // its latest step that fence_async ended

  int thread() const { return identity.thread; }
  Step step() const { return known[thread()]; }
  void next_step() { ++known[thread()]; }
};

struct Block;

struct Warp {
  Block *block = nullptr;
  int index = 0;
  std::array<Lane, WARP_LANES> lanes;
  // The warp-collective word that some lanes have arrived at.
  const char *word = nullptr;
  Perform perform = nullptr;
  std::array<void *, WARP_LANES> slots{};
  int arrived = 0;
  int held_by = -1;       // id of the block barrier that the warp waits at, or -1
  int copy_barrier = -1;  // between copy_begin and copy_end: the barrier, and bytes announced and copied
  int announced = 0, copied = 0;
  int stores_under_way = 0;                 // bulk stores not yet delivered
  std::vector<std::pair<int, int>> stored;  // offsets and bytes of bulk stores since the last bulk_store_wait

  // Orders what each lane did before what any lane does after.
  void join() {
    for (int l = 1; l < WARP_LANES; ++l) learn(lanes[0].known, lanes[l].known);
    for (int l = 1; l < WARP_LANES; ++l) lanes[l].known = lanes[0].known;
    for (Lane &lane : lanes) lane.next_step();
  }
};

// A barrier of the block's threads (bar.sync).
struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::vector<Warp *> waiting;
};

// An mbarrier. Phase n completes when its arrivals are in and its announced bytes are delivered.
struct Barrier {
  int arrivals = 0, pending_arrivals = 0;
  int64_t pending_bytes = 0;
  uint64_t phase = 0;
  int writer = 0;  // its place in Known
  int initialised_by = 0;
  Step initialised_at = 0;
  bool visible = false;  // barrier_init_fence came after barrier_init
  Known arrived;         // what the threads knew that arrived, of all phases
  Known released;        // the same when the last phase completed: what a waiting thread learns

  bool passed(int parity) const { return static_cast<int>(phase & 1) != parity; }
};

// An asynchronous copy (or, with `arrives`, one arrival once a lane's copies are done).
struct Copy {
  enum class Kind { In, Out, Arrive };
  Kind kind;
  int barrier;  // byte offset of the mbarrier; Out: none
  int offset;   // in shared memory
  void *global;
  int bytes, stride;  // pieces of 16 bytes every `stride` bytes; stride 16: one run
  Warp *warp;
  int announced_bytes;  // taken off the barrier's pending bytes when delivered
  uint64_t due;
};

struct Block {
  int index = 0, num_threads = 0, ended = 0;
  SharedMemory shared;
  std::vector<std::unique_ptr<Stack>> stacks;
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<NamedBarrier, 16> named;
  std::map<int, Barrier> barriers;
  std::vector<Copy> copies;

  Block(int index, int num_threads, int shared_bytes)
      : index(index), num_threads(num_threads), shared(shared_bytes, num_threads / WARP_LANES) {}
  Lane &lane(int thread) { return warps[thread / WARP_LANES]->lanes[thread % WARP_LANES]; }
  bool finished() const { return ended == num_threads; }
};

}  // namespace hw::emulation
