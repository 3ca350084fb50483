#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "bindings/tensor_call.h"

namespace ringcomm {

/// The sum of sparse (COO) tensors, in place: DDP calls it for sparse gradients of an embedding.
/// The ranks exchange their entries, whose number may differ, and add them in rank order, so that
/// all ranks have the same bits. Throws ValueError, NotImplementedError.
TensorCall sparse_all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op, int rank,
                                  int world_size);

}  // namespace ringcomm
