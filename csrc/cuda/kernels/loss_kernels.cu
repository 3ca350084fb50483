#include "cuda/kernels/gpu_row_block.cuh"
#include "cuda/kernels/loss_kernel_list.h"

// Older GPUs have no clusters, so images for them do not contain these kernels.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ringcomm::cuda {

/// (body) without its parentheses.
#define RINGCOMM_BARE(...) __VA_ARGS__

/// One block for each multiprocessor: 128 registers a thread.
#define RINGCOMM_LOSS_KERNEL(name, body)                        \
  extern "C" __global__ void __launch_bounds__(kLossThreads, 1) \
      name(const __grid_constant__ LossCall call) {             \
    GpuRowBlock block;                                          \
    RINGCOMM_BARE body(block, call);                            \
  }
RINGCOMM_LOSS_KERNELS(RINGCOMM_LOSS_KERNEL)

}  // namespace ringcomm::cuda

#endif
