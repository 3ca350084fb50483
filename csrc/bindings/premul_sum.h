#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ringcomm {

/// What a rank puts into a reduction: the tensor itself, and of ReduceOp.PREMUL_SUM a copy times
/// the factor, multiplied and rounded in the tensor's own type. The sum then is rounded as any
/// other. Throws TypeError where the type has no such products.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace ringcomm
