// Asynchronous copies when emulated: checked and marked when issued, delivered some turns later (schedule.cpp).
#include "launch.hpp"

namespace hw::emulation {

namespace {
struct CopyCall {
  Launch *launch;
  Warp *warp;
  int barrier, offset;
  void *global;
  int bytes;
  bool bulk;

  bool operator==(const CopyCall &o) const {
    return barrier == o.barrier && offset == o.offset && global == o.global && bytes == o.bytes;
  }
};

const CopyCall &same_in_all_lanes(void **slots, const char *word) {
  const CopyCall &call = *static_cast<CopyCall *>(slots[0]);
  for (int l = 1; l < WARP_LANES; ++l) {
    if (!(*static_cast<CopyCall *>(slots[l]) == call))
      call.launch->fail("%s: lanes 0 and %d give different arguments", word, l);
  }
  return call;
}
}  // namespace

uint64_t Launch::next_due() { return now_ + static_cast<uint64_t>(random_.below(max_delay_)); }

void Launch::check_copy(const char *word, int offset, const void *global, int bytes) {
  if (bytes <= 0 || bytes % COPY_PIECE != 0) fail("%s of %d bytes: not a positive multiple of 16", word, bytes);
  if (offset % COPY_PIECE != 0) fail("%s at byte %d of shared memory: not a multiple of 16", word, offset);
  if (reinterpret_cast<uintptr_t>(global) % COPY_PIECE != 0)
    fail("%s at global address %p: not a multiple of 16", word, global);
  if (reinterpret_cast<uintptr_t>(global) < 4096) fail("%s at global address %p", word, global);
  check_shared(offset, bytes, word);
}

// The unit that copies in bulk sees stores of threads only after their fence_async.
void Launch::check_fenced(const char *word, const Copy &copy) {
  Block &block = *copy.warp->block;
  for (int i = copy.offset; i < copy.offset + copy.bytes; ++i) {
    const int writer = block.shared.writer(i);
    if (writer < block.num_threads && block.shared.write_step(i) > block.lane(writer).fenced) {
      fail("%s at byte %d of shared memory: thread %d stored byte %d and did not call fence_async since", word,
           copy.offset, writer, i);
    }
  }
}

void Launch::copy_begin(int barrier, int total_bytes, bool bulk) {
  CopyCall mine{this, lane_->warp, barrier, 0, nullptr, total_bytes, bulk};
  converge("copy_begin", &mine, [](void **slots) {
    const CopyCall &call = same_in_all_lanes(slots, "copy_begin");
    call.launch->begin_copies(*call.warp, call.barrier, call.bytes, call.bulk);
  });
}

void Launch::begin_copies(Warp &warp, int offset, int total_bytes, bool bulk) {
  Barrier &barrier = barrier_at(*warp.block, offset, "copy_begin", &warp.lanes[0]);
  if (!barrier.visible) fail("copy_begin: barrier_init_fence was not called after barrier_init at byte %d", offset);
  if (warp.copy_barrier >= 0) fail("copy_begin: copy_end of the barrier at byte %d is missing", warp.copy_barrier);
  if (total_bytes < 0 || total_bytes >= 1 << 20) fail("copy_begin: %d bytes, expected 0..1048575", total_bytes);
  warp.copy_barrier = offset;
  warp.announced = total_bytes;
  warp.copied = 0;
  if (!bulk) return;
  barrier.pending_bytes += total_bytes;
  arrive(*warp.block, offset, "copy_begin", &warp.lanes[0]);
}

void Launch::copy(int barrier, int dst, const void *src, int bytes, bool bulk) {
  CopyCall mine{this, lane_->warp, barrier, dst, const_cast<void *>(src), bytes, bulk};
  converge("copy", &mine, [](void **slots) {
    const CopyCall &call = same_in_all_lanes(slots, "copy");
    Launch &launch = *call.launch;
    launch.check_copy("copy", call.offset, call.global, call.bytes);
    launch.issue_copy({Copy::Kind::In, call.barrier, call.offset, call.global, call.bytes, COPY_PIECE, call.warp, 0, 0},
                      call.bulk);
  });
}

void Launch::issue_copy(Copy copy, bool bulk) {
  Warp &warp = *copy.warp;
  Block &block = *warp.block;
  if (warp.copy_barrier != copy.barrier) fail("copy: copy_begin of the barrier at byte %d is missing", copy.barrier);
  const int bad = block.shared.first_other(copy.offset, copy.bytes, ByteState::Unwritten, ByteState::Written);
  if (bad >= 0)
    fail("copy of %d bytes to byte %d of shared memory: byte %d %s", copy.bytes, copy.offset, bad,
         block.shared.state(bad) == ByteState::Barrier ? "belongs to a barrier" : "is part of another copy under way");
  const Barrier &barrier = block.barriers.at(copy.barrier);
  for (int at = 0; at < copy.bytes; at += COPY_PIECE) {
    const Lane &lane = warp.lanes[bulk ? 0 : at / COPY_PIECE % WARP_LANES];  // the lane that issues this piece
    check_order(lane, copy.offset + at, COPY_PIECE, "copy", true);
  }
  if (bulk) check_fenced("copy", copy);
  block.shared.note_write(copy.offset, copy.bytes, barrier.writer, static_cast<Step>(barrier.phase + 1));
  block.shared.mark(copy.offset, copy.bytes, ByteState::Arriving);
  warp.copied += copy.bytes;
  traffic_.bulk_read += copy.bytes;
  if (bulk) {
    copy.announced_bytes = copy.bytes;
    copy.due = next_due();
    block.copies.push_back(copy);
    return;
  }
  // Lane l moves the pieces l, l + 32, ...
  for (int l = 0; l < WARP_LANES && l * COPY_PIECE < copy.bytes; ++l) {
    Copy part = copy;
    part.offset += l * COPY_PIECE;
    part.global = static_cast<uint8_t *>(copy.global) + l * COPY_PIECE;
    part.bytes -= l * COPY_PIECE;
    part.stride = WARP_LANES * COPY_PIECE;
    part.due = next_due();
    warp.lanes[l].last_due = std::max(warp.lanes[l].last_due, part.due);
    block.copies.push_back(part);
  }
}

void Launch::copy_end(int barrier, bool bulk) {
  CopyCall mine{this, lane_->warp, barrier, 0, nullptr, 0, bulk};
  converge("copy_end", &mine, [](void **slots) {
    const CopyCall &call = same_in_all_lanes(slots, "copy_end");
    call.launch->end_copies(*call.warp, call.barrier, call.bulk);
  });
}

void Launch::end_copies(Warp &warp, int offset, bool bulk) {
  if (warp.copy_barrier != offset) fail("copy_end: copy_begin of the barrier at byte %d is missing", offset);
  if (warp.copied != warp.announced) {
    fail("copy_end: copy_begin announced %d bytes to the barrier at byte %d, the copies have %d", warp.announced,
         offset, warp.copied);
  }
  warp.copy_barrier = -1;
  if (bulk) return;
  for (Lane &lane : warp.lanes) {
    warp.block->copies.push_back(
        {Copy::Kind::Arrive, offset, 0, nullptr, 0, COPY_PIECE, &warp, 0, std::max(now_, lane.last_due)});
  }
}

void Launch::fence_async() {
  lane_->fenced = lane_->step();
  lane_->next_step();
}

void Launch::bulk_store(void *dst, int src, int bytes, bool bulk) {
  CopyCall mine{this, lane_->warp, 0, src, dst, bytes, bulk};
  converge("bulk_store", &mine, [](void **slots) {
    const CopyCall &call = same_in_all_lanes(slots, "bulk_store");
    Launch &launch = *call.launch;
    launch.check_copy("bulk_store", call.offset, call.global, call.bytes);
    launch.issue_store({Copy::Kind::Out, 0, call.offset, call.global, call.bytes, COPY_PIECE, call.warp, 0, 0},
                       call.bulk);
  });
}

void Launch::issue_store(Copy copy, bool bulk) {
  Warp &warp = *copy.warp;
  Block &block = *warp.block;
  SharedMemory &shared = block.shared;
  const int bad = shared.first_other(copy.offset, copy.bytes, ByteState::Written, ByteState::Leaving);
  if (bad >= 0) {
    fail("bulk_store of %d bytes from byte %d of shared memory: byte %d %s", copy.bytes, copy.offset, bad,
         shared.state(bad) == ByteState::Unwritten ? "was never written" : "is part of a copy or a barrier");
  }
  for (int at = 0; at < copy.bytes; at += COPY_PIECE) {
    check_order(warp.lanes[bulk ? 0 : at / COPY_PIECE % WARP_LANES], copy.offset + at, COPY_PIECE, "bulk_store", false);
  }
  if (bulk) check_fenced("bulk_store", copy);
  shared.mark(copy.offset, copy.bytes, ByteState::Leaving);
  traffic_.bulk_written += copy.bytes;
  copy.due = next_due();
  ++warp.stores_under_way;
  warp.stored.emplace_back(copy.offset, copy.bytes);
  block.copies.push_back(copy);
}

void Launch::bulk_store_wait() {
  CopyCall mine{this, lane_->warp, 0, 0, nullptr, 0, false};
  converge("bulk_store_wait", &mine, [](void **) {});
  lane_->state = LaneState::Storing;
  while (lane_->warp->stores_under_way > 0) suspend();
  lane_->state = LaneState::Ready;
  converge("bulk_store_wait (its end)", &mine, [](void **slots) {
    const CopyCall &call = *static_cast<CopyCall *>(slots[0]);
    call.launch->end_stores(*call.warp);
  });
}

// Only now may the bytes be written again, by threads that are ordered after this warp.
void Launch::end_stores(Warp &warp) {
  SharedMemory &shared = warp.block->shared;
  for (const auto &[offset, bytes] : warp.stored) {
    shared.mark(offset, bytes, ByteState::Written);
    shared.note_read(offset, bytes, warp.lanes[0].thread(), warp.lanes[0].step());
  }
  warp.stored.clear();
  warp.join();
}

}  // namespace hw::emulation
