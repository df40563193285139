// Random numbers that are the same everywhere for the same seed (SplitMix64). Part of machine.cpp.
#pragma once

#include <cstdint>

namespace hw::emulation {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  // In [0, count).
  int below(int count) { return static_cast<int>((next() >> 32) * static_cast<uint64_t>(count) >> 32); }

 private:
  uint64_t state_;
};

}  // namespace hw::emulation
