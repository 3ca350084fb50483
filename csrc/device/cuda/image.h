#pragma once

#include <span>

namespace ringcomm::cuda {

/// The kernels as nvcc has compiled them, one image for each file of kernels; none where ringcomm
/// was built without nvcc.
std::span<const void* const> kernel_images();

/// That of loss_kernels.cu, which no group needs; null where there is none.
const void* loss_kernel_image();

}  // namespace ringcomm::cuda
