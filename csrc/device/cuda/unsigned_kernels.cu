#include "device/cuda/gpu_kernel.cuh"
#include "device/cuda/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_UNSIGNED_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
