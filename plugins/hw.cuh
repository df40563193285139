// The hardware words that CommitKV's kernels use; a kernel includes this file and nothing else from CUDA.
//
// One source, two machines. Under NVRTC (hw_cuda.cuh) each word is a few instructions of sm_80, sm_89, sm_90a or
// sm_120. With -DHW_EMULATED and a C++ compiler (emulation/) the same source runs on the CPU, a fiber per thread, and
// every word checks what the hardware would leave undefined. All names live in namespace hw.
//
//   HW_KERNEL(name, Params, THREADS, MIN_BLOCKS) { ... p.field ... }
//       an entry of at most THREADS threads a block, compiled so that MIN_BLOCKS blocks fit a multiprocessor;
//       `p` is the launch's `const Params &`
//   HW_DEVICE
//       every function that a kernel calls
//   HW_CHECK(condition, "what is wrong")
//       fails the launch when emulated, traps with -DHW_DEBUG, else costs nothing
//
// Where: thread() lane() block() num_threads() num_blocks(); warp(), which is warp-collective.
// Values: Vec<T, N> is aligned to its size. Fp16, Bf16: storage types; Half: the one that -DELEMENT chooses (0, 1).
//   to_float(x), from_float<T>(f); pack2(lo, hi) -> two Half in 32 bits, unpack2(bits) -> Vec<float, 2>;
//   fma2(a, b, c): two Half at once, rounded once; byte_perm(a, b, selector); bit_cast<T>(x);
//   fast_exp2 fast_log2 fast_sqrt inverse_sqrt max_of min_of infinity();
//   fast_max: of floats, one instruction, passes over a NaN
//
// Warp-collective words: all 32 lanes call them together.
//   warp_sync() shuffle(x, lane) shuffle_xor(x, mask) shuffle_down(x, n) any(b) ballot(b)
//   block_sync()
//       all threads of the block
//   named_sync(id, threads)
//       id 1..15; `threads` of the block, whole warps
//
// Shared memory, only through views; indexes count elements of the view:
//   shared<T>(byte_offset, count) -> Shared<T>: load(i) store(i, x) load_as<U>(i) store_as(i, u) cast<U>() at(i, count)
//   `_as`: a U that begins at element i, aligned to its size. Nothing is there when a block starts. An access of what
//   another thread wrote or read needs an order: warp_sync, block_sync, named_sync or an mbarrier (shuffles give none).
//
// Global memory: load(p), store(p, x), atomic_add(p, x), thread_fence(),
//   load_stream(p): of memory that the launch does not write; takes no place in L1
//   atomic_max(Fp16 *p, f): p = max(p, f) for values >= 0
//
// Barriers (mbarrier, 8 bytes each, phases 0, 1, 2, ...):
//   barriers(byte_offset, count) -> Barriers
//   barrier_init(b, i, arrivals)
//       one thread; then barrier_init_fence() by it and block_sync() by all
//   barrier_arrive(b, i)
//       one arrival of the calling thread; what it read or wrote before is ordered before the phase
//   barrier_wait(b, i, parity)
//       returns once the phase of that parity has completed; of a fresh barrier, parity 1 has
//       only parities are compared: the caller must know that the phase before the one it waits for has completed
//
// Copies into shared memory, one warp (collective); dst, src and bytes are multiples of 16:
//   copy_begin(b, i, total_bytes); copy(b, i, dst, src, bytes)...; copy_end(b, i);
//       adds COPY_ARRIVALS arrivals to the phase, which completes no earlier than the bytes are there
//   sm_90 and later: one thread announces the bytes and issues bulk copies (COPY_ARRIVALS = 1). Before, or with
//   -DHW_NO_BULK=1: every lane issues 16-byte asynchronous copies and arrives when its own are done (32).
// Copies out of shared memory, one warp (collective), same rules:
//   bulk_store(dst, src, bytes)
//   bulk_store_wait()
//       after it src may be written again and dst is written
// For both, where threads stored to the shared memory that is copied from or to:
//   fence_async()
//       each of them, after its stores and before the sync with the copying warp
//
// Tensor cores, warp-collective, fragments as PTX lays them out (g = lane / 4, t = lane % 4, two Half per register):
//   FragmentA [16 x 16]: r0 (g, 2t) r1 (g + 8, 2t) r2 (g, 2t + 8) r3 (g + 8, 2t + 8)
//   FragmentB [16 x 8]:  r0 (2t, g) r1 (2t + 8, g)                (rows 2t and 2t + 1 in one register)
//   FragmentC [16 x 8] fp32: r0 (g, 2t) r1 (g, 2t + 1) r2 (g + 8, 2t) r3 (g + 8, 2t + 1)
//   mma(c, a, b): c += a b; mma_fp16, pack2_fp16, fma2_fp16: the same with fp16 whatever Half is
//   transpose_8x8(row): lane (g, t) gives columns 2t, 2t + 1 of row g of an 8x8 matrix, and gets those of its transpose
//   ldmatrix_x4(view, i), ldmatrix_x2, ldmatrix_x4_trans, ldmatrix_x2_trans -> Vec<uint32_t, 4 or 2>: lane n gives the
//     element index of row n % 8 of 8x8 matrix n / 8 (16 bytes, aligned); a lane gets (row g, columns 2t, 2t + 1) of
//     each matrix, or of its transpose.
#pragma once

#ifdef HW_EMULATED
#include "emulation/hw_emulated.hpp"
#else
#include "hw_cuda.cuh"
#endif

namespace hw {

// Bytes a copy moves at least, and what its addresses and sizes are multiples of.
constexpr int COPY_GRANULE = 16;

HW_DEVICE float max_of(float a, float b) { return a > b ? a : b; }
HW_DEVICE float min_of(float a, float b) { return a < b ? a : b; }
HW_DEVICE int max_of(int a, int b) { return a > b ? a : b; }
HW_DEVICE int min_of(int a, int b) { return a < b ? a : b; }

}  // namespace hw
