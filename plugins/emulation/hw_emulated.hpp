// The words of hw.cuh on the CPU. Include hw.cuh, not this file.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.hpp"
#include "machine.hpp"

namespace hw::emulation {
static Machine *machine = nullptr;  // set by the launch, one at a time per library
}

#define HW_DEVICE inline
#define HW_EXPORT extern "C" __attribute__((visibility("default")))

// Called once after the library is loaded.
HW_EXPORT void hw_set_machine(hw::emulation::Machine *machine) { hw::emulation::machine = machine; }

#define HW_KERNEL(name, Params, THREADS, MIN_BLOCKS)                                   \
  static void name##_thread(const Params &p);                                          \
  HW_EXPORT const hw::emulation::KernelFacts name = {                                  \
      [](const void *params) { name##_thread(*static_cast<const Params *>(params)); }, \
      static_cast<int>(sizeof(Params)), (THREADS), (MIN_BLOCKS)};                      \
  static void name##_thread(const Params &p)

#define HW_CHECK(condition, what)                               \
  do {                                                          \
    if (!(condition)) hw::emulation::machine->fail("%s", what); \
  } while (0)

namespace hw {

using emulation::machine;

inline int thread() { return machine->self->thread; }
inline int lane() { return machine->self->thread % 32; }
// On a GPU a shuffle of all lanes: called where only some of them are, it would wait for ever.
inline int warp() {
  machine->converge("warp", nullptr, [](void **) {});
  return machine->self->thread / 32;
}
inline int block() { return machine->self->block; }
inline int num_threads() { return machine->self->num_threads; }
inline int num_blocks() { return machine->self->num_blocks; }

// ---- values

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
  T &operator[](int i) { return v[i]; }
  const T &operator[](int i) const { return v[i]; }
};

template <typename To, typename From>
To bit_cast(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float infinity() { return INFINITY; }
inline float inverse_sqrt(float x) { return 1.0f / std::sqrt(x); }
inline float fast_max(float a, float b) { return std::fmax(a, b); }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_sqrt(float x) { return std::sqrt(x); }

// Selects four of the eight bytes of b:a, a nibble of the selector each; bit 3 of a nibble repeats the byte's sign.
inline uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// ---- warps and blocks

namespace emulation {

template <typename T>
struct Exchange {
  T value;
  int argument;  // lane, mask or distance
};

// Every lane takes the value of lane `source(lane, argument)`.
template <typename T, typename Source>
T exchange(const char *word, T value, int argument, Source) {
  Exchange<T> mine{value, argument};
  machine->converge(word, &mine, [](void **slots) {
    T values[32];
    for (int i = 0; i < 32; ++i) values[i] = static_cast<Exchange<T> *>(slots[i])->value;
    for (int i = 0; i < 32; ++i) {
      auto *slot = static_cast<Exchange<T> *>(slots[i]);
      const int from = Source::of(i, slot->argument);
      if (from < 0) machine->fail("shuffle of lane %d with %d: outside the warp", i, slot->argument);
      slot->value = values[from];
    }
  });
  return mine.value;
}

struct FromLane {
  static int of(int, int source) { return source >= 0 && source < 32 ? source : -1; }
};
struct FromXor {
  static int of(int lane, int mask) { return mask >= 0 && mask < 32 ? lane ^ mask : -1; }
};
struct FromAbove {  // the highest lanes keep their own value
  static int of(int lane, int distance) {
    return distance < 0 || distance > 31 ? -1 : lane + distance < 32 ? lane + distance : lane;
  }
};

}  // namespace emulation

inline void warp_sync() { machine->warp_sync(); }
inline void block_sync() { machine->named_sync("block_sync", 0, 0); }
inline void named_sync(int id, int threads) { machine->named_sync("named_sync", id, threads); }
template <typename T>
T shuffle(T x, int source_lane) {
  return emulation::exchange("shuffle", x, source_lane, emulation::FromLane{});
}
template <typename T>
T shuffle_xor(T x, int mask) {
  return emulation::exchange("shuffle_xor", x, mask, emulation::FromXor{});
}
template <typename T>
T shuffle_down(T x, int distance) {
  return emulation::exchange("shuffle_down", x, distance, emulation::FromAbove{});
}
inline uint32_t ballot(bool x) {
  uint32_t mine = x;
  machine->converge("ballot", &mine, [](void **slots) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= *static_cast<uint32_t *>(slots[i]) << i;
    for (int i = 0; i < 32; ++i) *static_cast<uint32_t *>(slots[i]) = bits;
  });
  return mine;
}
inline bool any(bool x) { return ballot(x) != 0; }

// ---- shared memory

template <typename T>
struct Shared {
  int offset;  // bytes
  int count;   // elements

  T load(int i) const { return load_as<T>(i); }
  void store(int i, T x) const { store_as<T>(i, x); }
  template <typename U>
  U load_as(int i) const {
    U x;
    machine->shared_read(byte_of(i, sizeof(U)), &x, sizeof(U));
    return x;
  }
  template <typename U>
  void store_as(int i, U x) const {
    machine->shared_write(byte_of(i, sizeof(U)), &x, sizeof(U));
  }
  template <typename U>
  Shared<U> cast() const {
    return {offset, static_cast<int>(count * sizeof(T) / sizeof(U))};
  }
  Shared<T> at(int i, int elements) const {
    if (i < 0 || elements < 0 || i + elements > count) {
      machine->fail("shared memory: at(%d, %d) of a view of %d elements", i, elements, count);
    }
    return {offset + static_cast<int>(i * sizeof(T)), elements};
  }
  int byte_of(int i, int bytes) const {
    const int64_t first = static_cast<int64_t>(i) * static_cast<int>(sizeof(T));
    if (first < 0 || first + bytes > static_cast<int64_t>(count) * static_cast<int>(sizeof(T))) {
      machine->fail("shared memory: %d bytes at element %d of a view of %d elements of %d bytes", bytes, i, count,
                    static_cast<int>(sizeof(T)));
    }
    return offset + static_cast<int>(first);
  }
};

template <typename T>
Shared<T> shared(int byte_offset, int count) {
  return {byte_offset, count};
}

// ---- global memory

template <typename T>
T load(const T *p) {
  machine->global(emulation::Global::Read, p, sizeof(T));
  return *p;
}
template <typename T>
T load_stream(const T *p) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "one load instruction");
  return load(p);
}
template <typename T>
void store(T *p, T x) {
  machine->global(emulation::Global::Write, p, sizeof(T));
  *p = x;
}
template <typename T>
T atomic_add(T *p, T x) {
  machine->global(emulation::Global::Atomic, p, sizeof(T));
  const T old = *p;
  *p = old + x;
  return old;
}
inline void atomic_max(Fp16 *p, float value) {
  if (!(value >= 0)) machine->fail("atomic_max of %g: only values >= 0 order as their bits do", value);
  machine->global(emulation::Global::Atomic, p, sizeof(Fp16));
  const Fp16 wanted = from_float<Fp16>(value);
  if (p->bits < wanted.bits) *p = wanted;
}
inline void thread_fence() {}

// ---- barriers and copies

#if defined(HW_NO_BULK) && HW_NO_BULK
constexpr bool HW_BULK = false;
#else
constexpr bool HW_BULK = true;
#endif
constexpr int COPY_ARRIVALS = HW_BULK ? 1 : 32;

struct Barriers {
  Shared<uint64_t> words;
  int of(int i) const { return words.byte_of(i, 8); }
};

inline Barriers barriers(int byte_offset, int count) { return {shared<uint64_t>(byte_offset, count)}; }
inline void barrier_init(Barriers b, int i, int arrivals) { machine->barrier_init(b.of(i), arrivals); }
inline void barrier_init_fence() { machine->barrier_init_fence(); }
inline void barrier_arrive(Barriers b, int i) { machine->barrier_arrive(b.of(i)); }
inline void barrier_wait(Barriers b, int i, int parity) { machine->barrier_wait(b.of(i), parity); }

inline void copy_begin(Barriers b, int i, int total_bytes) { machine->copy_begin(b.of(i), total_bytes, HW_BULK); }
inline void copy(Barriers b, int i, Shared<uint8_t> dst, const void *src, int bytes) {
  machine->copy(b.of(i), dst.byte_of(0, bytes), src, bytes, HW_BULK);
}
inline void copy_end(Barriers b, int i) { machine->copy_end(b.of(i), HW_BULK); }
inline void fence_async() { machine->fence_async(); }
inline void bulk_store(void *dst, Shared<uint8_t> src, int bytes) {
  machine->bulk_store(dst, src.byte_of(0, bytes), bytes, HW_BULK);
}
inline void bulk_store_wait() { machine->bulk_store_wait(); }

}  // namespace hw

#include "tensor_core.hpp"
