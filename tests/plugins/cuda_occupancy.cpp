// NVIDIA's own count of resident blocks (cuda_occupancy.h), for test_sass.py.
#include "cuda_occupancy.h"

#include <climits>
#include <cstring>

extern "C" __attribute__((visibility("default"))) int nvidia_blocks(int major, int minor, int sm_threads,
                                                                    int sm_shared_bytes, int threads, int registers,
                                                                    int shared_bytes) {
  cudaOccDeviceProp device;
  device.computeMajor = major;
  device.computeMinor = minor;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = sm_threads;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerMultiprocessor = sm_shared_bytes;
  device.sharedMemPerBlock = 48 * 1024;
  device.sharedMemPerBlockOptin = sm_shared_bytes - 1024;
  device.reservedSharedMemPerBlock = 1024;
  device.numSms = 132;
  cudaOccFuncAttributes entry;
  entry.maxThreadsPerBlock = 1024;
  entry.numRegs = registers;
  entry.sharedSizeBytes = 0;
  entry.partitionedGCConfig = PARTITIONED_GC_OFF;
  entry.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  entry.maxDynamicSharedSizeBytes = shared_bytes;
  entry.numBlockBarriers = 1;
  cudaOccDeviceState state;
  cudaOccResult result;
  const cudaOccError status =
      cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &entry, &state, threads, shared_bytes);
  return status == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1 - static_cast<int>(status);
}
