#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
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
/// Any other text, truncated to the size of a name.
ElementName element_name(std::string_view text);
Reduction reduction_of(const c10d::ReduceOp& op, const char* name);

/// Dense, defined, and on a CPU or an accelerator.
void check_tensor(const at::Tensor& tensor, const char* op);
/// float32, float16 or bfloat16; `name` is the argument's.
void check_float_dtype(const at::Tensor& tensor, const char* name, const char* op);
/// The one tensor of a list; c10d's signatures carry lists from the time of several GPUs per
/// process.
const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors, const char* op);
/// One tensor per rank, of any sizes; each must pass check_tensor() and have `reference`'s dtype.
void check_shares(const std::vector<at::Tensor>& tensors, int world_size,
                  const at::Tensor& reference, const char* op);
/// The one list of a list of lists; or null where the list belongs to the root and this rank is
/// not.
const std::vector<at::Tensor>* only_list(const std::vector<std::vector<at::Tensor>>& lists,
                                         bool has_list, const char* op);
void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op);

/// Copies a result to a tensor that the call could not write directly. Like the engine's own
/// writes, it is not recorded by autograd, so the tensor may be a parameter or an inference tensor.
/// From any thread.
void copy_back(const at::Tensor& to, const at::Tensor& from);

}  // namespace ringcomm
