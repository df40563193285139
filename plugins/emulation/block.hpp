// State of a block while it runs: threads, warps, barriers, copies under way. Part of machine.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "fiber.hpp"
#include "machine.hpp"
#include "shared_memory.hpp"

namespace hw::emulation {

constexpr int WARP_LANES = 32;

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
  Stack *stack = nullptr;
  LaneState state = LaneState::Ready;
  int wait_barrier = 0, wait_parity = 0;  // while Waiting
  uint64_t last_due = 0;  // when this lane's latest asynchronous copy is delivered
  uint32_t fences = 0;    // calls of fence_async
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
  int held_by = -1;          // id of the block barrier that the warp waits at, or -1
  int copy_barrier = -1;     // between copy_begin and copy_end: the barrier, and bytes announced and copied
  int announced = 0, copied = 0;
  int stores_under_way = 0;  // bulk stores not yet read from shared memory and written
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
  const Lane *initialised_by = nullptr;
  bool visible = false;  // barrier_init_fence came after barrier_init

  bool passed(int parity) const { return static_cast<int>(phase & 1) != parity; }
};

// An asynchronous copy (or, with `arrives`, one arrival once a lane's copies are done).
struct Copy {
  enum class Kind { In, Out, Arrive };
  Kind kind;
  int barrier;           // byte offset of the mbarrier; Out: none
  int offset;            // in shared memory
  void *global;
  int bytes, stride;     // pieces of 16 bytes every `stride` bytes; stride 16: one run
  Warp *warp;
  int announced_bytes;   // taken off the barrier's pending bytes when delivered
  uint64_t due;
};

struct Block {
  int index = 0, num_threads = 0, ended = 0;
  SharedMemory shared;
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<NamedBarrier, 16> named;
  std::map<int, Barrier> barriers;
  std::vector<Copy> copies;

  Block(int index, int num_threads, int shared_bytes) : index(index), num_threads(num_threads), shared(shared_bytes) {}
  bool finished() const { return ended == num_threads; }
};

}  // namespace hw::emulation
