// One block's shared memory and what is known of each byte. Part of machine.cpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace hw::emulation {

enum class ByteState : uint8_t {
  Unwritten,  // nothing stored since the block began
  Written,
  Arriving,  // an asynchronous copy into it has not been delivered
  Leaving,   // an asynchronous copy out of it has not been waited for
  Barrier,   // holds an mbarrier
};

class SharedMemory {
 public:
  explicit SharedMemory(int bytes) : data_(bytes, 0xff), states_(bytes, ByteState::Unwritten) {}  // 0xff..: NaN

  int bytes() const { return static_cast<int>(data_.size()); }
  bool holds(int offset, int bytes) const { return offset >= 0 && bytes >= 0 && offset + bytes <= this->bytes(); }
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

 private:
  std::vector<uint8_t> data_;
  std::vector<ByteState> states_;
};

}  // namespace hw::emulation
