#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "bindings/tensor_call.h"

namespace ringcomm {

/// The sum of sparse (COO) tensors, in place: what DDP asks for where an embedding has sparse
/// gradients. The ranks exchange their entries, however many each has, and add them up in rank
/// order, so that all have the same bits. Throws ValueError, NotImplementedError.
TensorCall sparse_all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op, int rank,
                                  int world_size);

}  // namespace ringcomm
