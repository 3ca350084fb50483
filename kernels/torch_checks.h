#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

#include "kernels/common/types.h"

// Checks of the tensors that users pass: torch's ValueError or TypeError; `op` is what they called.

namespace ringcomm {

/// Dense, defined, no view with a negative bit, and on a CPU or an accelerator.
void check_tensor(const at::Tensor& tensor, const char* op);
void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op);
/// float32, float16 or bfloat16; `name` is the argument's.
void check_float_dtype(const at::Tensor& tensor, const char* name, const char* op);
DType reduced_dtype(const at::Tensor& tensor, const char* op);
/// The kernel for Autograd of an operator that writes and has no gradient, because another
/// operator's backward may need the overwritten values: raises ValueError where what it writes, or
/// with a group any tensor, requires grad. torch.compile calls no other kernel with tensors that
/// do. `instead`: what else to use than no_grad(), as "all_reduce, or ".
torch::CppFunction refuse_grad(const std::string& instead = "");
/// Makes a backward pass fail that saved what the tensor was before.
void mark_written(const at::Tensor& tensor);

// ---- of operators that compute

/// Dense and on the device, which is the weight's. `name` is the argument's.
void check_dense(const at::Tensor& tensor, const char* name, const char* op,
                 at::Device device = at::kCPU);
/// The same, in float32, float16 or bfloat16.
void check_float(const at::Tensor& tensor, const char* name, const char* op,
                 at::Device device = at::kCPU);
/// The DType of such a tensor.
DType float_dtype_of(const at::Tensor& tensor);
/// Dense, on the device and of the dtype.
void check_dtype(const at::Tensor& tensor, at::ScalarType dtype, const char* name, const char* op,
                 at::Device device = at::kCPU);
void check_shape(const at::Tensor& tensor, at::IntArrayRef sizes, const char* name, const char* op);
/// No memory of `written` is in `other`.
void check_apart(const at::Tensor& written, const at::Tensor& other, const char* op);

/// A thread is worth its start from some 10 us of work on.
inline constexpr std::int64_t kGrainElems = 32768;

}  // namespace ringcomm
