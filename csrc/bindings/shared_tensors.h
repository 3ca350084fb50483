#pragma once

#include <ATen/core/Tensor.h>

namespace ringcomm {

/// A CPU tensor like torch.empty's, in memory that other processes of this host can map
/// (shm::SharedArena); it is freed with the last tensor on its storage. Throws torch's
/// OutOfMemoryError.
at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype);

/// Whether all elements of the tensor are in such memory of this process.
bool is_shared(const at::Tensor& tensor);

}  // namespace ringcomm
