#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "ops/weight_update.h"

// torch.ops.ringcomm.*: in-place updates of weights, from their gradients or from the factors of
// these. This file has their schemas and sgd_update_; linear_update_ops.cc, embedding_update_ops.cc
// and adalomo_ops.cc implement the others. Fakes and wrappers are in
// ringcomm/ops/updates/weight_update.py, the formulas in docs/design/optim.md.

namespace ringcomm {
namespace {

void sgd_update_(const at::Tensor& weight, const at::Tensor& grad, double lr, double weight_decay,
                 double scale, int64_t rounding_seed, const std::optional<at::Tensor>& low,
                 std::optional<double> clip_value, int64_t first_elem) {
  constexpr const char* kOp = "sgd_update_";
  const WeightArray array(weight, low, rounding_seed, false, kOp);
  const WeightStep step = weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, kOp);
  check_first_elem(first_elem, kOp);
  check_grad(grad, weight, kOp);
  array.check_writable({grad});
  const at::Tensor ordered = in_order_of(grad, weight);
  const WeightOps& ops = array.ops(float_dtype_of(ordered));
  const auto* grads = static_cast<const char*>(ordered.const_data_ptr());
  at::parallel_for(0, array.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    WeightRun run = array.run(begin, end - begin);
    run.grad = grads + begin * ordered.element_size();
    run.first_elem += static_cast<std::uint64_t>(first_elem);
    ops.update(step, run);
  });
  array.mark_written();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "sgd_update_(Tensor(a!) weight, Tensor grad, float lr, float weight_decay, float scale, "
      "int rounding_seed=-1, *, Tensor(b!)? low=None, float? clip_value=None, int first_elem=0) "
      "-> ()");
  m.def(
      "linear_sgd_update_(Tensor(a!) weight, Tensor x, Tensor grad_out, float lr, "
      "float weight_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None) -> ()");
  m.def(
      "embedding_sgd_update_(Tensor(a!) weight, Tensor indices, Tensor grad_out, float lr, "
      "float weight_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None, int padding_idx=-1) -> ()");
  m.def(
      "square_sums(Tensor grad, float scale, *, float? clip_value=None) "
      "-> (Tensor rows, Tensor cols)");
  m.def(
      "adalomo_squares(Tensor weight, Tensor grad, Tensor row_factor, Tensor col_factor, "
      "float scale, *, Tensor? low=None, float? clip_value=None) -> Tensor");
  m.def(
      "adalomo_update_(Tensor(a!) weight, Tensor grad, Tensor row_factor, Tensor col_factor, "
      "Tensor step_and_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None, int first_elem=0) -> ()");
}

TORCH_LIBRARY_IMPL(ringcomm, CPU, m) { m.impl("sgd_update_", sgd_update_); }

}  // namespace ringcomm
