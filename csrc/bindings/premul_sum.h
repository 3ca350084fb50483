#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ringcomm {

/// A rank's operand of a reduction: the tensor itself or, for ReduceOp.PREMUL_SUM, a copy times the
/// factor, multiplied and rounded in the tensor's own type. The sum is then rounded like any other.
/// Throws TypeError if the type has no such products.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace ringcomm
