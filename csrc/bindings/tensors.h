#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collectives/collective.h"
#include "core/types.h"

namespace ringcomm {

/// Checks of what users pass, and torch's types in the engine's terms. `op` is the collective's
/// name for messages. Wrong arguments throw torch's ValueError, TypeError or NotImplementedError.

/// The element type for a reduction.
DType reduced_dtype(const at::Tensor& tensor, const char* op);
/// The same for what is only moved, in torch's words: "Float8_e5m2".
ElementName element_name_of(const at::Tensor& tensor);
Reduction reduction_of(const c10d::ReduceOp& op, const char* name);

/// Dense, defined and on the CPU.
void check_tensor(const at::Tensor& tensor, const char* op);
/// The one tensor of a list; c10d's signatures carry lists from the time of several GPUs per
/// process.
const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors, const char* op);
/// All like `reference` in size and dtype, and `count` of them.
void check_alike(const std::vector<at::Tensor>& tensors, std::size_t count,
                 const at::Tensor& reference, const char* op);
void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op);

/// Copies a result to where the call could not put it. Like the engine's own writes unseen by
/// autograd, so that it may be a parameter or made in inference mode; from any thread.
void copy_back(const at::Tensor& to, const at::Tensor& from);

/// The call is not there yet.
[[noreturn]] void not_there_yet(const char* call);

}  // namespace ringcomm
