// Barriers in shared memory and asynchronous copies for NVIDIA GPUs. Part of hw_cuda.cuh.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !(defined(HW_NO_BULK) && HW_NO_BULK)
#define HW_BULK 1
#else
#define HW_BULK 0
#endif

namespace hw {

constexpr int COPY_ARRIVALS = HW_BULK ? 1 : 32;

struct Barriers {
  uint32_t address;
  HW_DEVICE uint32_t of(int i) const { return address + 8 * i; }
};

HW_DEVICE Barriers barriers(int byte_offset, int) { return {shared_address(hw_shared_memory + byte_offset)}; }

HW_DEVICE void barrier_init(Barriers b, int i, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b.of(i)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the unit that copies, which reads memory by another path.
HW_DEVICE void barrier_init_fence() {
#if HW_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

HW_DEVICE void barrier_arrive(Barriers b, int i) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(b.of(i)) : "memory");
}

HW_DEVICE void barrier_wait(Barriers b, int i, int parity) {
  uint32_t done = 0;
  do {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(b.of(i)), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(b.of(i)), "r"(parity)
                 : "memory");
#endif
  } while (done == 0);
}

#if HW_BULK

HW_DEVICE void copy_begin(Barriers b, int i, int total_bytes) {
  if (lane() == 0) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(b.of(i)),
                 "r"(total_bytes)
                 : "memory");
  }
  __syncwarp();
}

HW_DEVICE void copy(Barriers b, int i, Shared<uint8_t> dst, const void *src, int bytes) {
  if (lane() == 0) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(dst.data)),
                 "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(b.of(i))
                 : "memory");
  }
}

HW_DEVICE void copy_end(Barriers, int) { __syncwarp(); }

HW_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

HW_DEVICE void bulk_store(void *dst, Shared<uint8_t> src, int bytes) {
  if (lane() == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(dst)),
                 "r"(shared_address(src.data)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

HW_DEVICE void bulk_store_wait() {
  if (lane() == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  __syncwarp();
}

#else

HW_DEVICE void copy_begin(Barriers, int, int) {}

HW_DEVICE void copy(Barriers, int, Shared<uint8_t> dst, const void *src, int bytes) {
  const uint32_t to = shared_address(dst.data);
  const uint8_t *from = static_cast<const uint8_t *>(src);
  for (int at = lane() * 16; at < bytes; at += 32 * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(__cvta_generic_to_global(from + at))
                 : "memory");
  }
}

// Arrives once this lane's copies are done; noinc: the arrival is one of those that barrier_init counted.
HW_DEVICE void copy_end(Barriers b, int i) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(b.of(i)) : "memory");
}

HW_DEVICE void fence_async() {}

HW_DEVICE void bulk_store(void *dst, Shared<uint8_t> src, int bytes) {
  uint8_t *to = static_cast<uint8_t *>(dst);
  for (int at = lane() * 16; at < bytes; at += 32 * 16) {
    *reinterpret_cast<uint4 *>(to + at) = *reinterpret_cast<const uint4 *>(src.data + at);
  }
}

HW_DEVICE void bulk_store_wait() { __syncwarp(); }

#endif

}  // namespace hw
