#include "cuda/kernels/gpu_kernel.cuh"
#include "cuda/kernels/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_OTHER_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
