// The toy kernels on a real GPU, for those tests of the emulator whose rules are CUDA's own. Data
// and flags are in memory of the host, which host and GPU both read.
#include "emulator/toy_parameters.h"

using namespace ringcomm::emulator;

namespace {

__device__ std::int64_t first_elem() { return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ std::int64_t stride() { return std::int64_t{blockDim.x} * gridDim.x; }

__device__ std::uint64_t now_ns() {
  std::uint64_t ns = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// By one thread of one block, so that it need not be atomic.
__device__ void count(std::uint32_t* number) {
  if (number == nullptr) return;
  volatile std::uint32_t* seen = number;
  *seen = *seen + 1;
  __threadfence_system();
}

}  // namespace

extern "C" __global__ void toy_add(ToyAdd p) {
  for (std::int64_t i = first_elem(); i < p.num_elems; i += stride()) p.to[i] += p.number;
}

extern "C" __global__ void toy_scale(ToyScale p) {
  for (std::int64_t i = first_elem(); i < p.num_elems; i += stride()) p.to[i] *= p.number;
}

extern "C" __global__ void toy_signal(ToySignal p) {
  if (threadIdx.x != 0) return;
  __threadfence_system();
  *static_cast<volatile std::uint32_t*>(p.flag) = p.value;
}

extern "C" __global__ void toy_await(ToyAwait p) {
  if (threadIdx.x != 0) return;
  count(p.num_running);
  const std::uint64_t end = now_ns() + std::uint64_t{p.limit_ms} * 1000000;
  const volatile std::uint32_t* flag = p.flag;
  while (*flag != p.value)
    if (now_ns() > end) return count(p.num_gave_up);
  __threadfence_system();
}
