// What each word does and checks when emulated, and the entry points that Python calls.
#include <cstring>
#include <mutex>

#include "launch.hpp"

namespace hw::emulation {

// Called in a lane, never resumed; or in the scheduler.
void Launch::fail(const char *format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  failed_ = true;
  if (lane_ == nullptr) {
    error_ = text;
    throw LaunchFailed{};
  }
  const Identity &who = lane_->identity;
  error_ = "block " + std::to_string(who.block) + ", thread " + std::to_string(who.thread) + " (warp " +
           std::to_string(who.thread / WARP_LANES) + ", lane " + std::to_string(who.thread % WARP_LANES) + "): " + text;
  suspend();
  __builtin_unreachable();
}

void Launch::converge(const char *word, void *slot, Perform perform) {
  Warp &warp = *lane_->warp;
  if (warp.arrived == 0) {
    warp.word = word;
    warp.perform = perform;
  } else if (perform != warp.perform || std::strcmp(word, warp.word) != 0) {
    fail("is at %s while other lanes of its warp are at %s: all 32 lanes must call the same word", word, warp.word);
  }
  warp.slots[lane_->identity.thread % WARP_LANES] = slot;
  if (++warp.arrived < WARP_LANES) {
    lane_->state = LaneState::AtWord;
    suspend();
    return;
  }
  perform(warp.slots.data());
  warp.arrived = 0;
  for (Lane &lane : warp.lanes) lane.state = LaneState::Ready;
  if (warp.held_by >= 0) suspend();
}

void Launch::warp_sync() {
  converge("warp_sync", lane_->warp, [](void **slots) { static_cast<Warp *>(slots[0])->join(); });
}

namespace {
struct SyncCall {
  Launch *launch;
  Warp *warp;
  const char *word;
  int id, threads;
};
}  // namespace

void Launch::named_sync(const char *word, int id, int threads) {
  SyncCall mine{this, lane_->warp, word, id, threads};
  converge(word, &mine, [](void **slots) {
    const SyncCall &call = *static_cast<SyncCall *>(slots[0]);
    for (int l = 1; l < WARP_LANES; ++l) {
      const SyncCall &other = *static_cast<SyncCall *>(slots[l]);
      if (other.id != call.id || other.threads != call.threads) {
        call.launch->fail("%s(%d, %d) in lane 0 but (%d, %d) in lane %d", call.word, call.id, call.threads, other.id,
                          other.threads, l);
      }
    }
    call.launch->join_named(*call.warp, call.id, call.threads);
  });
}

void Launch::join_named(Warp &warp, int id, int threads) {
  Block &block = *warp.block;
  const bool whole = threads == 0;
  if (whole) threads = block.num_threads;
  if (!whole && (id < 1 || id > 15)) fail("named_sync: id %d, expected 1..15 (0 is block_sync)", id);
  if (threads < WARP_LANES || threads % WARP_LANES != 0 || threads > block.num_threads) {
    fail("named_sync(%d, %d): expected a multiple of 32 up to the block's %d threads", id, threads, block.num_threads);
  }
  NamedBarrier &barrier = block.named[id];
  if (barrier.waiting.empty()) {
    barrier.threads = threads;
  } else if (barrier.threads != threads) {
    fail("named_sync(%d, %d): warp %d waits at this barrier for %d threads", id, threads, barrier.waiting[0]->index,
         barrier.threads);
  }
  barrier.arrived += WARP_LANES;
  if (barrier.arrived < barrier.threads) {
    barrier.waiting.push_back(&warp);
    warp.held_by = id;
    return;
  }
  barrier.waiting.push_back(&warp);
  Known all = warp.lanes[0].known;
  for (const Warp *member : barrier.waiting) {
    for (const Lane &lane : member->lanes) learn(all, lane.known);
  }
  for (Warp *member : barrier.waiting) {
    for (Lane &lane : member->lanes) lane.known = all, lane.next_step();
    member->held_by = -1;
  }
  barrier.waiting.clear();
  barrier.arrived = 0;
}

// ---- memory

void Launch::check_shared(int offset, int bytes, const char *what) {
  const SharedMemory &shared = block().shared;
  if (!shared.holds(offset, bytes)) {
    fail("%s of %d bytes at byte %d of shared memory: the launch has %d bytes", what, bytes, offset, shared.bytes());
  }
}

void Launch::refuse_conflict(const Lane &lane, const Conflict &conflict, const char *access, const char *earlier) {
  if (conflict.byte < 0) return;
  const int num_threads = lane.identity.num_threads;
  const bool copied = conflict.by >= num_threads;
  std::string other = "thread " + std::to_string(conflict.by);
  if (copied) {
    for (const auto &[offset, barrier] : block().barriers) {
      if (barrier.writer == conflict.by)
        other = "the copy that the barrier at byte " + std::to_string(offset) + " counts";
    }
  }
  fail("%s by thread %d at byte %d of shared memory: nothing orders it after the %s by %s (a missing barrier)", access,
       lane.thread(), conflict.byte, earlier, other.c_str());
}

void Launch::check_order(const Lane &lane, int offset, int bytes, const char *access, bool writes) {
  const SharedMemory &shared = block().shared;
  refuse_conflict(lane, shared.unordered_write(offset, bytes, lane.known), access, "write");
  if (writes) refuse_conflict(lane, shared.unordered_read(offset, bytes, lane.known), access, "read");
}

void Launch::shared_read(int offset, void *to, int bytes, int lane) {
  check_shared(offset, bytes, "read");
  if (offset % bytes != 0) fail("read of %d bytes at byte %d of shared memory: not aligned to its size", bytes, offset);
  SharedMemory &shared = block().shared;
  const int bad = shared.first_other(offset, bytes, ByteState::Written, ByteState::Leaving);
  if (bad >= 0) {
    const ByteState state = shared.state(bad);
    fail("read of %d bytes at byte %d of shared memory: byte %d %s", bytes, offset, bad,
         state == ByteState::Unwritten  ? "was never written"
         : state == ByteState::Arriving ? "is still arriving by an asynchronous copy"
                                        : "belongs to a barrier");
  }
  const Lane &reader = lane < 0 ? *lane_ : lane_->warp->lanes[lane];
  check_order(reader, offset, bytes, "read", false);
  shared.note_read(offset, bytes, reader.thread(), reader.step());
  std::memcpy(to, shared.at(offset), bytes);
}

void Launch::shared_write(int offset, const void *from, int bytes) {
  check_shared(offset, bytes, "write");
  if (offset % bytes != 0)
    fail("write of %d bytes at byte %d of shared memory: not aligned to its size", bytes, offset);
  SharedMemory &shared = block().shared;
  const int bad = shared.first_other(offset, bytes, ByteState::Unwritten, ByteState::Written);
  if (bad >= 0) {
    const ByteState state = shared.state(bad);
    fail("write of %d bytes at byte %d of shared memory: byte %d %s", bytes, offset, bad,
         state == ByteState::Arriving  ? "is still arriving by an asynchronous copy"
         : state == ByteState::Leaving ? "is being copied out (bulk_store_wait comes first)"
                                       : "belongs to a barrier");
  }
  check_order(*lane_, offset, bytes, "write", true);
  shared.note_write(offset, bytes, lane_->thread(), lane_->step());
  shared.mark(offset, bytes, ByteState::Written);
  std::memcpy(shared.at(offset), from, bytes);
}

void Launch::global(Global kind, const void *address, int bytes) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  const char *what = kind == Global::Read ? "load" : kind == Global::Write ? "store" : "atomic";
  if (value < 4096) fail("%s of %d bytes at global address %#zx", what, bytes, static_cast<size_t>(value));
  if (value % bytes != 0) fail("%s of %d bytes at global address %p: not aligned to its size", what, bytes, address);
  (kind == Global::Read    ? traffic_.plain_read
   : kind == Global::Write ? traffic_.plain_written
                           : traffic_.atomic_bytes) += bytes;
}

// ---- barriers

// user: the thread that uses it, null when a copy does.
Barrier &Launch::barrier_at(Block &block, int offset, const char *word, const Lane *user) {
  const auto found = block.barriers.find(offset);
  if (found == block.barriers.end()) fail("%s: no barrier was initialised at byte %d", word, offset);
  const Barrier &barrier = found->second;
  if (user != nullptr && user->known[barrier.initialised_by] < barrier.initialised_at) {
    fail("%s: nothing orders it after barrier_init of the barrier at byte %d by thread %d (a missing barrier)", word,
         offset, barrier.initialised_by);
  }
  return found->second;
}

void Launch::barrier_init(int offset, int arrivals) {
  check_shared(offset, 8, "barrier_init");
  if (offset % 8 != 0) fail("barrier_init at byte %d of shared memory: not a multiple of 8", offset);
  if (arrivals < 1 || arrivals >= 1 << 20) fail("barrier_init: %d arrivals, expected 1..1048575", arrivals);
  if (block().barriers.count(offset)) fail("barrier_init: the barrier at byte %d is initialised already", offset);
  if (block().shared.first_other(offset, 8, ByteState::Unwritten, ByteState::Written) >= 0) {
    fail("barrier_init at byte %d: a copy is under way there, or another barrier", offset);
  }
  const int index = static_cast<int>(block().barriers.size());
  if (index == MAX_BARRIERS) fail("barrier_init: more than the %d barriers of a block that are emulated", MAX_BARRIERS);
  check_order(*lane_, offset, 8, "barrier_init", true);
  block().shared.mark(offset, 8, ByteState::Barrier);
  Barrier &barrier = block().barriers[offset];
  barrier.arrivals = barrier.pending_arrivals = arrivals;
  barrier.writer = block().num_threads + index;
  barrier.initialised_by = lane_->thread();
  barrier.initialised_at = lane_->step();
  barrier.arrived.assign(lane_->known.size(), 0);
  barrier.released = barrier.arrived;
}

void Launch::barrier_init_fence() {
  for (auto &[offset, barrier] : block().barriers) barrier.visible |= barrier.initialised_by == lane_->thread();
}

void Launch::complete_if_done(Barrier &barrier) {
  if (barrier.pending_arrivals > 0 || barrier.pending_bytes > 0) return;
  ++barrier.phase;
  barrier.pending_arrivals = barrier.arrivals;
  barrier.released = barrier.arrived;
  barrier.released[barrier.writer] = static_cast<Step>(barrier.phase);
}

// by: the arriving thread, null when a copy arrives.
void Launch::arrive(Block &block, int offset, const char *word, Lane *by) {
  Barrier &barrier = barrier_at(block, offset, word, by);
  if (barrier.pending_arrivals == 0) {
    fail("%s: phase %llu of the barrier at byte %d already has its %d arrivals (one too many)", word,
         static_cast<unsigned long long>(barrier.phase), offset, barrier.arrivals);
  }
  if (by != nullptr) {
    learn(barrier.arrived, by->known);
    by->next_step();
  }
  --barrier.pending_arrivals;
  complete_if_done(barrier);
}

void Launch::barrier_arrive(int offset) { arrive(block(), offset, "barrier_arrive", lane_); }

void Launch::barrier_wait(int offset, int parity) {
  Barrier &barrier = barrier_at(block(), offset, "barrier_wait", lane_);
  if (parity != 0 && parity != 1) fail("barrier_wait: parity %d, expected 0 or 1", parity);
  const uint64_t phase = barrier.phase;
  if (!barrier.passed(parity)) {
    lane_->wait_barrier = offset;
    lane_->wait_parity = parity;
    lane_->state = LaneState::Waiting;
    while (!barrier.passed(parity)) suspend();
    lane_->state = LaneState::Ready;
    if (barrier.phase > phase + 1) {
      fail("barrier_wait: the barrier at byte %d went on from phase %llu to %llu while this thread waited", offset,
           static_cast<unsigned long long>(phase), static_cast<unsigned long long>(barrier.phase));
    }
  }
  // Who knows of the phase has learnt, perhaps from another thread, all that it released.
  if (lane_->known[barrier.writer] < barrier.released[barrier.writer]) learn(lane_->known, barrier.released);
}

// ---- entry points

namespace {
std::mutex one_launch_at_a_time;
}

struct Report {
  Traffic traffic;
  char error[4000];
};

}  // namespace hw::emulation

// Runs one launch of a kernel whose library calls `set_machine`. 0: done; 1: report->error says what is wrong.
extern "C" __attribute__((visibility("default"))) int hw_launch(void (*set_machine)(hw::emulation::Machine *),
                                                                const hw::emulation::KernelFacts *kernel,
                                                                const void *params,
                                                                const hw::emulation::LaunchPlan *plan,
                                                                hw::emulation::Report *report) {
  using namespace hw::emulation;
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  Launch launch(*kernel, params, *plan);
  set_machine(&launch);
  const bool done = launch.run();
  set_machine(nullptr);
  report->traffic = launch.traffic();
  snprintf(report->error, sizeof report->error, "%s", launch.error().c_str());
  return done ? 0 : 1;
}
