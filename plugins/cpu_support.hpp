// What the native forms of all operations share: codes of types and instruction levels, and the two services that must
// not be compiled per level (asking the processor, and sharing work among threads). Plain data and declarations.
#pragma once

#include <cstdint>

namespace commitkv {

enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, I4 = 4 };  // native_levels.py holds the same codes
enum Level : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AMX = 3 };

typedef void (*ParallelBody)(void *);

static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

static inline int64_t element_bytes(int32_t dtype) { return dtype == F32 ? 4 : 2; }

static inline int64_t code_row_bytes(int32_t format, int64_t head_dim) {
  return format == F32 ? head_dim * 4 : format == I8 ? head_dim : format == I4 ? head_dim / 2 : head_dim * 2;
}

// Whether this processor runs code of the level; for AMX this also asks the kernel for the tile registers.
bool processor_has(int32_t level);

// Runs body(data) on the caller and on up to num_threads - 1 sleeping others; body takes pieces until none is left.
void run_parallel(ParallelBody body, void *data, int32_t num_threads);

// A counter from which threads take the pieces [0, count) of a loop.
struct Pieces {
  int64_t count;
  int64_t next;

  bool take(int64_t &piece) {
    piece = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    return piece < count;
  }
};

}  // namespace commitkv

#define COMMITKV_EXPORT __attribute__((visibility("default")))
#define COMMITKV_JOIN2(a, b) a##_##b
#define COMMITKV_JOIN(a, b) COMMITKV_JOIN2(a, b)
// Name of a C entry of the unit's level, such as commitkv_append_avx512.
#define COMMITKV_ENTRY(name) extern "C" COMMITKV_EXPORT void COMMITKV_JOIN(name, COMMITKV_LEVEL)
