// One launch: schedules the lanes of a few resident blocks and carries their words out. Part of machine.cpp.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "block.hpp"
#include "random.hpp"

namespace hw::emulation {

struct LaunchPlan {
  int grid, threads, shared_bytes;
  int resident_blocks;  // blocks that run at the same time
  uint64_t seed;
};

struct LaunchFailed {};

class Launch final : public Machine {
 public:
  Launch(const KernelFacts &kernel, const void *params, const LaunchPlan &plan);
  // Runs every block to its end. False: error() says why not.
  bool run();
  const std::string &error() const { return error_; }
  const Traffic &traffic() const { return traffic_; }

  [[noreturn]] void fail(const char *format, ...) override;
  void converge(const char *word, void *slot, Perform perform) override;
  void warp_sync() override;
  void named_sync(const char *word, int id, int threads) override;
  void shared_read(int offset, void *to, int bytes, int lane = -1) override;
  void shared_write(int offset, const void *from, int bytes) override;
  void global(Global kind, const void *address, int bytes) override;
  void barrier_init(int offset, int arrivals) override;
  void barrier_init_fence() override;
  void barrier_arrive(int offset) override;
  void barrier_wait(int offset, int parity) override;
  void copy_begin(int barrier, int total_bytes, bool bulk) override;
  void copy(int barrier, int dst, const void *src, int bytes, bool bulk) override;
  void copy_end(int barrier, bool bulk) override;
  void fence_async() override;
  void bulk_store(void *dst, int src, int bytes, bool bulk) override;
  void bulk_store_wait() override;

  // Carried out by one lane for its warp (machine.cpp, copies.cpp).
  void join_named(Warp &warp, int id, int threads);
  void begin_copies(Warp &warp, int barrier, int total_bytes, bool bulk);
  void issue_copy(Copy copy, bool bulk);
  void end_copies(Warp &warp, int barrier, bool bulk);
  void issue_store(Copy copy, bool bulk);
  void check_copy(const char *word, int offset, const void *global, int bytes);
  void end_stores(Warp &warp);

 private:
  // schedule.cpp
  static void lane_entry();
  void start_block(int index);
  void finish_block(size_t at);
  void take_turn();
  bool runnable(const Lane &lane) const;
  void suspend();
  void deliver_due();
  void deliver(Block &block, const Copy &copy);
  [[noreturn]] void report_deadlock();
  std::string describe(const Block &block, const Warp &warp) const;
  std::string describe(const Block &block, const Warp &warp, const Lane &lane) const;

  // machine.cpp
  Block &block() { return *lane_->warp->block; }
  Barrier &barrier_at(Block &block, int offset, const char *word, const Lane *user);
  void arrive(Block &block, int offset, const char *word, Lane *by);
  void check_fenced(const char *word, const Copy &copy);
  void complete_if_done(Barrier &barrier);
  void refuse_conflict(const Lane &lane, const Conflict &conflict, const char *access, const char *earlier);
  void check_order(const Lane &lane, int offset, int bytes, const char *access, bool writes);
  void check_shared(int offset, int bytes, const char *what);
  uint64_t next_due();

  const KernelFacts &kernel_;
  const void *params_;
  LaunchPlan plan_;
  Random random_;
  Fiber scheduler_;
  Lane *lane_ = nullptr;  // the running lane; null: the scheduler
  std::vector<int> block_order_;
  size_t started_ = 0;
  std::vector<std::unique_ptr<Block>> resident_;
  std::vector<Lane *> turn_;
  size_t turn_at_ = 0;
  Warp *last_warp_ = nullptr;
  int keep_warp_percent_, max_delay_;
  uint64_t now_ = 0;  // in turns
  bool failed_ = false;
  std::string error_;
  Traffic traffic_{};
};

}  // namespace hw::emulation
