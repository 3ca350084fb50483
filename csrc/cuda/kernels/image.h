#pragma once

#include <span>

namespace ringcomm::cuda {

/// The kernels of groups as nvcc has compiled them, one image for each file of kernels; none where
/// ringcomm was built without nvcc.
std::span<const void* const> kernel_images();

/// Those of losses alone, which no group needs.
std::span<const void* const> loss_kernel_images();

}  // namespace ringcomm::cuda
