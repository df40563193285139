// What a kernel compiled for the CPU asks of the machine that runs it. The two are separate libraries: the machine is
// compiled once, each kernel alone; a kernel reaches the machine only through this class.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hw::emulation {

// Bytes moved to and from global memory by one launch. Bulk: asynchronous copies in either form.
struct Traffic {
  uint64_t bulk_read, bulk_written, plain_read, plain_written, atomic_bytes;
};
enum class Global : int { Read, Write, Atomic };

// The thread that runs now.
struct Identity {
  int thread, num_threads, block, num_blocks;
};

// What HW_KERNEL states about an entry.
struct KernelFacts {
  void (*body)(const void *params);
  int params_bytes, max_threads, min_blocks;
};

// Carries a warp-collective word out, by the lane that arrived last. slots[n]: the arguments and results of lane n.
using Perform = void (*)(void **slots);

class Machine {
 public:
  const Identity *self = nullptr;

  // Ends the launch with an error that names kernel, block, thread.
  [[noreturn]] virtual void fail(const char *format, ...) __attribute__((format(printf, 2, 3))) = 0;

  // Waits until all 32 lanes are at the same word, then lets one of them perform it.
  virtual void converge(const char *word, void *slot, Perform perform) = 0;
  // warp_sync and block barriers order memory; shuffles do not. id 0 with threads 0: the whole block.
  virtual void warp_sync() = 0;
  virtual void named_sync(const char *word, int id, int threads) = 0;

  // lane: of the running thread's warp, on whose behalf it reads; -1: itself.
  virtual void shared_read(int offset, void *to, int bytes, int lane = -1) = 0;
  virtual void shared_write(int offset, const void *from, int bytes) = 0;
  // Checks the address and counts the bytes; the caller moves them.
  virtual void global(Global kind, const void *address, int bytes) = 0;

  virtual void barrier_init(int offset, int arrivals) = 0;
  virtual void barrier_init_fence() = 0;
  virtual void barrier_arrive(int offset) = 0;
  virtual void barrier_wait(int offset, int parity) = 0;

  virtual void copy_begin(int barrier, int total_bytes, bool bulk) = 0;
  virtual void copy(int barrier, int dst, const void *src, int bytes, bool bulk) = 0;
  virtual void copy_end(int barrier, bool bulk) = 0;
  virtual void fence_async() = 0;
  virtual void bulk_store(void *dst, int src, int bytes, bool bulk) = 0;
  virtual void bulk_store_wait() = 0;

 protected:
  ~Machine() = default;
};

}  // namespace hw::emulation
