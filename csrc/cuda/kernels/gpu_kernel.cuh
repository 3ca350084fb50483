#pragma once

#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/limits.h"

/// (body) without its parentheses, which keep commas of template arguments together.
#define RINGCOMM_BARE(...) __VA_ARGS__

/// The parameter stays in constant memory: indexed at run time, a copy would go to local memory.
#define RINGCOMM_GPU_KERNEL(name, Call, body)                                              \
  extern "C" __global__ void __launch_bounds__(::ringcomm::cuda::kBlockThreads,            \
                                               ::ringcomm::cuda::kBlocksPerMultiprocessor) \
      name(const __grid_constant__::ringcomm::cuda::Call call) {                           \
    __shared__::ringcomm::cuda::GpuBlock::Shared shared;                                   \
    ::ringcomm::cuda::GpuBlock block(call, shared);                                        \
    RINGCOMM_BARE body(block, call);                                                       \
  }
