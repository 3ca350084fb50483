#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "kernels/weight_update.h"

namespace ringcomm {

// Argument checks of the updates, which are torch operators in ops/weight_update_ops.cc,
// ops/adalomo_ops.cc and ops/optimizer_ops.cc. Wrong arguments throw ValueError or TypeError.

/// The arguments that all updates have; see docs/design/optim.md.
struct UpdateOptions {
  double lr = 0;
  double weight_decay = 0;
  double scale = 1;
  std::optional<double> clip_value;
  std::int64_t rounding_seed = -1;
};

/// Checked and rounded. `op` is the operator's name for messages.
WeightStep weight_step_of(const UpdateOptions& options, const char* op);

/// A weight and how it is kept: dense, or in two dimensions and contiguous where it `is_matrix`.
class WeightArray {
 public:
  WeightArray(const at::Tensor& weight, const std::optional<at::Tensor>& low,
              std::int64_t rounding_seed, bool is_matrix, const char* op);

  const at::Tensor& weight() const { return weight_; }
  std::int64_t numel() const { return weight_.numel(); }
  WeightFormat format() const { return format_; }
  const WeightOps& ops(DType grad_dtype) const;

  /// Elements in the order of memory, with their numbers and without a gradient.
  WeightRun run(std::int64_t begin, std::int64_t num_elems) const;
  /// Throws if the overwritten tensors require a gradient or overlap a tensor of `read`.
  void check_writable(std::initializer_list<at::Tensor> read) const;
  void mark_written() const;

 private:
  at::Tensor weight_;
  std::optional<at::Tensor> low_;
  WeightFormat format_;
  const char* op_;
};

/// float32, float16 or bfloat16. `name` is the argument's.
void check_float(const at::Tensor& tensor, const char* name, const char* op);
/// The DType of such a tensor.
DType float_dtype_of(const at::Tensor& tensor);
void check_fp32(const at::Tensor& tensor, const char* name, const char* op);
void check_shape(const at::Tensor& tensor, at::IntArrayRef sizes, const char* name, const char* op);
/// No memory of `written` is in `other`.
void check_apart(const at::Tensor& written, const at::Tensor& other, const char* op);
void check_grad(const at::Tensor& grad, const at::Tensor& weight, const char* op);
void check_first_elem(std::int64_t first_elem, const char* op);
/// A gradient with its elements in the weight's order in memory.
at::Tensor in_order_of(const at::Tensor& grad, const at::Tensor& weight);

/// A thread is worth its start from some 10 us of work on.
inline constexpr std::int64_t kGrainElems = 32768;

}  // namespace ringcomm
