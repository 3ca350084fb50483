#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/torch_checks.h"
#include "kernels/updates/update_op.h"
#include "kernels/updates/weight_update.h"

namespace ringcomm {

// Argument checks of the updates, which are torch operators. Wrong arguments throw ValueError or
// TypeError.

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

/// What an optimizer's step reads and writes; the state is this rank's shard in a fused update.
struct UpdateTensors {
  const at::Tensor& param;
  const at::Tensor& grad;
  at::TensorList states;  ///< in the order of UpdateArrays
  const std::optional<at::Tensor>& master;

  /// All but the gradient.
  void mark_written() const;
};

/// The step that an operator's arguments describe, but for the parameters' type. `numbers` are lr,
/// weight_decay and the coefficients of UpdateSpec.
UpdateSpec update_spec_of(const UpdateTensors& tensors, const std::string& optimizer,
                          at::ArrayRef<double> numbers, bool nesterov, std::int64_t step,
                          double grad_scale);
/// The arrays of a step by the operator `op`, checked, and the parameters' type in `spec`. States
/// have `state_elems` elements, which are `what`. No two share memory.
UpdateArrays checked_arrays(const UpdateTensors& tensors, UpdateSpec& spec,
                            std::int64_t state_elems, const std::string& what, const char* op);

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
  void check_writable(const std::vector<at::Tensor>& read) const;
  void mark_written() const;

 private:
  at::Tensor weight_;
  std::optional<at::Tensor> low_;
  WeightFormat format_;
  const char* op_;
};

/// The passes over a gradient of this type.
const GradOps& grad_ops_of(const at::Tensor& grad);
void check_grad(const at::Tensor& grad, const at::Tensor& weight, const char* op);
void check_first_elem(std::int64_t first_elem, const char* op);
/// A checked gradient with its elements in the weight's order in memory.
at::Tensor ordered_grad(const at::Tensor& grad, const at::Tensor& weight, const char* op);
/// linear_sgd_update_: its input and output gradient, checked, with a row for each token.
std::pair<at::Tensor, at::Tensor> tokens_of(const at::Tensor& weight, const at::Tensor& x,
                                            const at::Tensor& grad_out);
/// embedding_sgd_update_: all but the values of the indices.
void check_embedding(const at::Tensor& weight, const at::Tensor& indices,
                     const at::Tensor& grad_out, std::int64_t padding_idx);
/// AdaLomo: moments of an axis each, and the sums of squares, of any parts, to move them to.
void check_moments(const std::optional<at::Tensor>& row, const at::Tensor& col,
                   const at::Tensor& row_sums, const at::Tensor& col_sums, const char* op);
/// AdaLomo: what makes the direction of an update, and the squares that decide its size.
void check_factors(const at::Tensor& weight, const std::optional<at::Tensor>& row,
                   const at::Tensor& col_factor, const at::Tensor& row_mean,
                   const std::optional<at::Tensor>& squares, const char* op);

}  // namespace ringcomm
