// One block's shared memory and what is known of each byte. Part of machine.cpp.
//
// Order of accesses: every thread counts its steps, a new one after each word that releases (barrier_arrive, warp_sync,
// block barriers, fence_async), and knows how far it has seen every other thread: the steps it acquired by such words.
// An access is ordered after another when the thread knows the other's step. Each mbarrier has a place in the same
// list, as the writer of the copies that it counts: its step is the phase that completes with them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace hw::emulation {

constexpr int WARP_LANES = 32;
constexpr int MAX_BARRIERS = 64;  // of one block

using Step = uint32_t;

// What one thread knows of the steps of all writers: threads first, then barriers.
using Known = std::vector<Step>;

inline void learn(Known &mine, const Known &other) {
  Step *to = mine.data();
  const Step *from = other.data();
  for (size_t i = 0; i < mine.size(); ++i) to[i] = to[i] > from[i] ? to[i] : from[i];
}

enum class ByteState : uint8_t {
  Unwritten,  // nothing stored since the block began
  Written,
  Arriving,  // an asynchronous copy into it has not been delivered
  Leaving,   // an asynchronous copy out of it has not been waited for
  Barrier,   // holds an mbarrier
};

// An access that another one is not ordered after.
struct Conflict {
  int byte = -1;  // -1: there is none
  int by = 0;     // thread, or num_threads + index of a barrier
};

class SharedMemory {
 public:
  SharedMemory(int bytes, int num_warps)
      : data_(bytes, 0xff),  // NaN
        states_(bytes, ByteState::Unwritten),
        writers_(zeros<uint16_t>(bytes)),
        writes_(zeros<Step>(bytes)),
        reads_(zeros<Step>(static_cast<size_t>(bytes) * num_warps)),
        num_warps_(num_warps) {}

  int bytes() const { return static_cast<int>(data_.size()); }
  bool holds(int offset, int bytes) const { return offset >= 0 && bytes >= 0 && offset <= this->bytes() - bytes; }
  uint8_t *at(int offset) { return data_.data() + offset; }
  ByteState state(int offset) const { return states_[offset]; }

  // First byte of [offset, offset + bytes) whose state is none of the two, or -1.
  int first_other(int offset, int bytes, ByteState allowed, ByteState also_allowed) const {
    for (int i = offset; i < offset + bytes; ++i) {
      if (states_[i] != allowed && states_[i] != also_allowed) return i;
    }
    return -1;
  }
  void mark(int offset, int bytes, ByteState state) { std::memset(&states_[offset], static_cast<int>(state), bytes); }

  // The first write to these bytes that `known` does not cover.
  Conflict unordered_write(int offset, int bytes, const Known &known) const {
    for (int i = offset; i < offset + bytes; ++i) {
      if (writes_.get()[i] > known[writers_.get()[i]]) return {i, writers_.get()[i]};
    }
    return {};
  }
  // The first read of these bytes that `known` does not cover. Of each warp the latest read is remembered.
  Conflict unordered_read(int offset, int bytes, const Known &known) const {
    for (int w = 0; w < num_warps_; ++w) {
      const Step *reads = reads_of(w);
      for (int i = offset; i < offset + bytes; ++i) {
        const int reader = w * WARP_LANES + static_cast<int>(reads[i] % WARP_LANES);
        if (reads[i] / WARP_LANES > known[reader]) return {i, reader};
      }
    }
    return {};
  }
  void note_read(int offset, int bytes, int thread, Step step) {
    Step *reads = reads_of(thread / WARP_LANES);
    const Step value = step * WARP_LANES + thread % WARP_LANES;
    for (int i = offset; i < offset + bytes; ++i) reads[i] = value;
  }
  // Forgets the reads before it: what is ordered after this write is ordered after them.
  void note_write(int offset, int bytes, int writer, Step step) {
    for (int i = offset; i < offset + bytes; ++i) {
      writers_.get()[i] = static_cast<uint16_t>(writer);
      writes_.get()[i] = step;
    }
    for (int w = 0; w < num_warps_; ++w) std::memset(reads_of(w) + offset, 0, bytes * sizeof(Step));
  }
  int writer(int offset) const { return writers_.get()[offset]; }
  Step write_step(int offset) const { return writes_.get()[offset]; }

 private:
  struct Free {
    void operator()(void *memory) const { std::free(memory); }
  };
  // Pages that nothing touches cost nothing.
  template <typename T>
  static std::unique_ptr<T, Free> zeros(size_t count) {
    void *memory = std::calloc(count ? count : 1, sizeof(T));
    if (memory == nullptr) throw std::bad_alloc();
    return std::unique_ptr<T, Free>(static_cast<T *>(memory));
  }
  Step *reads_of(int warp) const { return reads_.get() + static_cast<size_t>(warp) * data_.size(); }

  std::vector<uint8_t> data_;
  std::vector<ByteState> states_;
  std::unique_ptr<uint16_t, Free> writers_;
  std::unique_ptr<Step, Free> writes_;
  std::unique_ptr<Step, Free> reads_;  // [warp][byte], 32 * step + lane
  int num_warps_;
};

}  // namespace hw::emulation
