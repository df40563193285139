// What is fetched while others are multiplied: a core that multiplies is too far behind to keep the memory busy by
// itself. Several passes over the same weights, with other rows each, share the fetching, since memory could not
// deliver all of it during one.
#pragma once

#include "../simd.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {

struct BlocksAhead {
  const char *at;
  int64_t apart, step;  // bytes between streams, and from one fetch of a stream to the next

  template <int STREAMS>
  __attribute__((always_inline)) void fetch() {
#pragma GCC unroll 4
    for (int i = 0; i < STREAMS; ++i) __builtin_prefetch(at + i * apart, 0, 2);
    at += step;
  }
};

struct TokensAhead {
  const char *at;
  int64_t apart, wait, passes;  // bytes between tokens; parts until the next that is fetched, one in so many

  // Part of four tokens that begins `byte` bytes after their beginnings. Its end may lie beyond theirs.
  template <int BYTES>
  __attribute__((always_inline)) void fetch(int64_t byte) {
    if (wait-- > 0) return;
    wait = passes - 1;
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(at + t * apart + byte + i, 0, 2);
    }
  }
};

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
