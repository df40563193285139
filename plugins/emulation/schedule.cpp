// Which lane runs next. A turn lets every lane of one warp that can run do so until it waits, in a random order;
// between turns the warp is chosen at random and asynchronous copies whose time has come are delivered.
#include <algorithm>
#include <cstring>

#include "launch.hpp"

namespace hw::emulation {

namespace {
Launch *running = nullptr;                         // the launch whose fibers run: one at a time
std::vector<std::unique_ptr<Stack>> spare_stacks;  // of launches that ended: their pages are there already

std::unique_ptr<Stack> take_stack() {
  if (spare_stacks.empty()) return std::make_unique<Stack>();
  std::unique_ptr<Stack> stack = std::move(spare_stacks.back());
  spare_stacks.pop_back();
  return stack;
}
}  // namespace

Launch::Launch(const KernelFacts &kernel, const void *params, const LaunchPlan &plan)
    : kernel_(kernel), params_(params), plan_(plan), random_(plan.seed) {
  for (int i = 0; i < plan.grid; ++i) block_order_.push_back(i);
  for (int i = plan.grid - 1; i > 0; --i) std::swap(block_order_[i], block_order_[random_.below(i + 1)]);
  // Some launches let one warp run far ahead, some switch at every step; some copies arrive at once, some very late.
  // The longest delay: copies arrive once all threads wait for some, in an order that has nothing to do with theirs.
  const int keep[] = {0, 50, 90, 98}, delays[] = {1, 8, 64, 512, 1 << 20};
  keep_warp_percent_ = keep[random_.below(4)];
  max_delay_ = delays[random_.below(5)];
}

bool Launch::run() {
  running = this;
  try {
    while (started_ < block_order_.size() || !resident_.empty()) {
      while (started_ < block_order_.size() && static_cast<int>(resident_.size()) < plan_.resident_blocks) {
        start_block(block_order_[started_++]);
      }
      take_turn();
      for (size_t i = resident_.size(); i-- > 0;) {
        if (resident_[i]->finished()) finish_block(i);
      }
    }
  } catch (const LaunchFailed &) {
  }
  running = nullptr;
  return !failed_;
}

void Launch::start_block(int index) {
  resident_.push_back(std::make_unique<Block>(index, plan_.threads, plan_.shared_bytes));
  Block &block = *resident_.back();
  for (int w = 0; w < plan_.threads / WARP_LANES; ++w) {
    block.warps.push_back(std::make_unique<Warp>());
    Warp &warp = *block.warps.back();
    warp.block = &block;
    warp.index = w;
    for (int l = 0; l < WARP_LANES; ++l) {
      Lane &lane = warp.lanes[l];
      block.stacks.push_back(take_stack());
      lane.fiber.prepare(*block.stacks.back(), lane_entry);
      lane.identity = {w * WARP_LANES + l, plan_.threads, index, plan_.grid};
      lane.warp = &warp;
      lane.known.assign(plan_.threads + MAX_BARRIERS, 0);
      lane.next_step();
    }
  }
}

void Launch::finish_block(size_t at) {
  Block &block = *resident_[at];
  const std::string name = "block " + std::to_string(block.index);
  if (!block.copies.empty()) {
    const Copy &copy = block.copies.front();
    fail("%s ended while an asynchronous copy %s its shared memory at byte %d was under way: wait for it first",
         name.c_str(), copy.kind == Copy::Kind::Out ? "out of" : "into", copy.offset);
  }
  for (const auto &warp : block.warps) {
    if (!warp->stored.empty())
      fail("%s, warp %d ended after a bulk_store without bulk_store_wait", name.c_str(), warp->index);
    if (warp->copy_barrier >= 0)
      fail("%s, warp %d ended after a copy_begin without copy_end", name.c_str(), warp->index);
  }
  for (auto &stack : block.stacks) spare_stacks.push_back(std::move(stack));
  last_warp_ = nullptr;
  resident_.erase(resident_.begin() + static_cast<std::ptrdiff_t>(at));
}

void Launch::lane_entry() {
  Launch &launch = *running;
  Lane &lane = *launch.lane_;
  lane.fiber.entered(launch.scheduler_);
  launch.kernel_.body(launch.params_);
  lane.state = LaneState::Ended;
  ++lane.warp->block->ended;
  launch.suspend();
}

bool Launch::runnable(const Lane &lane) const {
  if (lane.state == LaneState::Waiting)
    return lane.warp->block->barriers.at(lane.wait_barrier).passed(lane.wait_parity);
  if (lane.state == LaneState::Storing) return lane.warp->stores_under_way == 0;
  return lane.state == LaneState::Ready;
}

void Launch::take_turn() {
  ++now_;
  deliver_due();
  std::vector<Warp *> candidates;
  const auto can_run = [this](const Warp &warp) {
    return warp.held_by < 0 &&
           std::any_of(warp.lanes.begin(), warp.lanes.end(), [this](auto &l) { return runnable(l); });
  };
  if (last_warp_ && random_.below(100) < keep_warp_percent_ && can_run(*last_warp_)) {
    candidates.push_back(last_warp_);
  } else {
    for (const auto &block : resident_) {
      for (const auto &warp : block->warps) {
        if (can_run(*warp)) candidates.push_back(warp.get());
      }
    }
  }
  if (candidates.empty()) {
    uint64_t earliest = UINT64_MAX;
    for (const auto &block : resident_) {
      for (const Copy &copy : block->copies) earliest = std::min(earliest, copy.due);
    }
    if (earliest == UINT64_MAX) report_deadlock();
    now_ = std::max(now_, earliest);
    return;
  }
  last_warp_ = candidates[random_.below(static_cast<int>(candidates.size()))];
  turn_.clear();
  // Neighbours, or lanes far apart, run after each other.
  const int first = random_.below(WARP_LANES), step = 2 * random_.below(WARP_LANES / 2) + 1;
  for (int i = 0; i < WARP_LANES; ++i) {
    Lane &lane = last_warp_->lanes[(first + i * step) % WARP_LANES];
    if (runnable(lane)) turn_.push_back(&lane);
  }
  turn_at_ = 1;
  lane_ = turn_[0];
  self = &lane_->identity;
  scheduler_.switch_to(lane_->fiber);
  lane_ = nullptr;
  if (failed_) throw LaunchFailed{};
}

// Called in a lane: runs the turn's next lane, or the scheduler after the last.
void Launch::suspend() {
  Lane *mine = lane_;
  const bool ends = mine->state == LaneState::Ended;
  if (!failed_ && turn_at_ < turn_.size()) {
    lane_ = turn_[turn_at_++];
    self = &lane_->identity;
    mine->fiber.switch_to(lane_->fiber, ends);
  } else {
    mine->fiber.switch_to(scheduler_, ends);
  }
}

void Launch::deliver_due() {
  for (const auto &block : resident_) {
    auto &copies = block->copies;
    for (size_t i = 0; i < copies.size();) {
      if (copies[i].due > now_) {
        ++i;
        continue;
      }
      const Copy copy = copies[i];
      copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
      deliver(*block, copy);
    }
  }
}

void Launch::deliver(Block &block, const Copy &copy) {
  if (copy.kind != Copy::Kind::Arrive) {
    auto *global = static_cast<uint8_t *>(copy.global);
    for (int at = 0; at < copy.bytes; at += copy.stride) {
      const int piece = copy.stride == COPY_PIECE ? copy.bytes : COPY_PIECE;
      if (copy.kind == Copy::Kind::In) {
        std::memcpy(block.shared.at(copy.offset + at), global + at, piece);
      } else {
        std::memcpy(global + at, block.shared.at(copy.offset + at), piece);
      }
      if (copy.kind == Copy::Kind::In) block.shared.mark(copy.offset + at, piece, ByteState::Written);
      if (copy.stride == COPY_PIECE) break;
    }
  }
  if (copy.kind == Copy::Kind::Out) {
    --copy.warp->stores_under_way;
    return;
  }
  Barrier &barrier = block.barriers.at(copy.barrier);
  barrier.pending_bytes -= copy.announced_bytes;
  if (copy.kind == Copy::Kind::Arrive) {
    arrive(block, copy.barrier, "copy_end", nullptr);
  } else {
    complete_if_done(barrier);
  }
}

std::string Launch::describe(const Block &block, const Warp &warp, const Lane &lane) const {
  char text[240] = "ready";
  if (lane.state == LaneState::Ended) return "ended";
  if (warp.held_by >= 0) {
    const NamedBarrier &barrier = block.named[warp.held_by];
    snprintf(text, sizeof text, "at block barrier %d (%d of %d threads)", warp.held_by, barrier.arrived,
             barrier.threads);
  } else if (lane.state == LaneState::AtWord) {
    snprintf(text, sizeof text, "at %s (%d of 32 lanes)", warp.word, warp.arrived);
  } else if (lane.state == LaneState::Waiting) {
    const Barrier &barrier = block.barriers.at(lane.wait_barrier);
    snprintf(
        text, sizeof text,
        "waiting for parity %d of the barrier at byte %d (in phase %llu: %d of %d arrivals and %lld bytes missing)",
        lane.wait_parity, lane.wait_barrier, static_cast<unsigned long long>(barrier.phase), barrier.pending_arrivals,
        barrier.arrivals, static_cast<long long>(barrier.pending_bytes));
  }
  return text;
}

// Runs of lanes in the same situation.
std::string Launch::describe(const Block &block, const Warp &warp) const {
  std::string text = "warp " + std::to_string(warp.index) + ":";
  for (int first = 0; first < WARP_LANES;) {
    const std::string situation = describe(block, warp, warp.lanes[first]);
    int end = first + 1;
    while (end < WARP_LANES && describe(block, warp, warp.lanes[end]) == situation) ++end;
    if (end - first < WARP_LANES) text += " lanes " + std::to_string(first) + "-" + std::to_string(end - 1);
    text += " " + situation + (end < WARP_LANES ? "," : "");
    first = end;
  }
  return text;
}

// Names the first block that waits, warp by warp.
void Launch::report_deadlock() {
  const Block &block = *resident_[0];
  error_ = "deadlock in block " + std::to_string(block.index);
  for (const auto &warp : block.warps) error_ += "; " + describe(block, *warp);
  failed_ = true;
  throw LaunchFailed{};
}

}  // namespace hw::emulation
