#pragma once

#include <ATen/core/Tensor.h>

#include "core/types.h"

namespace ringcomm {

/// Checks of the tensors that users pass. `op` is what they called. Wrong tensors throw torch's
/// ValueError or TypeError.

/// Dense, defined, and on a CPU or an accelerator.
void check_tensor(const at::Tensor& tensor, const char* op);
void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op);
/// The engine's element type for a reduction.
DType reduced_dtype(const at::Tensor& tensor, const char* op);

}  // namespace ringcomm
