#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "bindings/op_support.h"
#include "bindings/process_group.h"
#include "reduce/update_op.h"

// torch.ops.ringcomm.reduce_scatter_update_all_gather_, an overload for each optimizer. Fakes and
// the wrapper are in ringcomm/ops/updates/fused_update.py.

namespace ringcomm {
namespace {

constexpr const char* kOpName = "reduce_scatter_update_all_gather_";

UpdateSpec spec_of(Optimizer optimizer, double lr, double weight_decay, double grad_scale,
                   std::array<double, 3> coefficients, int64_t step) {
  TORCH_CHECK_VALUE(step >= 1 && step <= std::numeric_limits<std::uint32_t>::max(),
                    "ringcomm: step must be 1 or more, got ", step);
  return {.lr = lr,
          .weight_decay = weight_decay,
          .grad_scale = grad_scale,
          .coefficients = coefficients,
          .step = static_cast<std::uint32_t>(step),
          .optimizer = optimizer};
}

void run(const UpdateTensors& tensors, const UpdateSpec& spec, bool average,
         const std::string& group_name) {
  check_no_grad(tensors.param, kOpName, "");
  ringcomm_group_of(group_name, tensors.param, kOpName)
      ->reduce_update_gather(tensors, spec, average);
  mark_written(tensors.param);
  if (tensors.master.has_value()) mark_written(*tensors.master);
  for (const auto& [name, state] : tensors.states)
    if (state.has_value()) mark_written(*state);
}

void update_sgd(const at::Tensor& param, const at::Tensor& grad,
                const std::optional<at::Tensor>& momentum_buffer,
                const std::optional<at::Tensor>& master, const std::string& group_name, double lr,
                double momentum, double dampening, double weight_decay, bool nesterov, int64_t step,
                bool average, double grad_scale) {
  UpdateSpec spec =
      spec_of(Optimizer::kSgd, lr, weight_decay, grad_scale, {momentum, dampening}, step);
  spec.is_nesterov = nesterov;
  run({param, grad, master, {{"momentum_buffer", momentum_buffer}}}, spec, average, group_name);
}

void update_adamw(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& master,
                  const std::string& group_name, double lr, double beta1, double beta2, double eps,
                  double weight_decay, int64_t step, bool average, double grad_scale) {
  run({param, grad, master, {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}},
      spec_of(Optimizer::kAdamW, lr, weight_decay, grad_scale, {beta1, beta2, eps}, step), average,
      group_name);
}

void update_lomo(const at::Tensor& param, const at::Tensor& grad, const std::string& group_name,
                 double lr, double weight_decay, std::optional<double> clip_value, bool average,
                 double grad_scale) {
  TORCH_CHECK_VALUE(!clip_value.has_value() || *clip_value > 0,
                    "ringcomm: clip_value must be positive or None, got ", clip_value.value_or(0));
  // Without state, every step is like the first.
  run({param, grad, std::nullopt, {}},
      spec_of(Optimizer::kLomo, lr, weight_decay, grad_scale, {clip_value.value_or(0)}, 1), average,
      group_name);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "reduce_scatter_update_all_gather_.sgd(Tensor(a!) param, Tensor grad, "
      "Tensor(b!)? momentum_buffer, Tensor(c!)? master, str group_name, *, float lr, "
      "float momentum, float dampening, float weight_decay, bool nesterov, int step, bool average, "
      "float grad_scale) -> ()");
  m.def(
      "reduce_scatter_update_all_gather_.adamw(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, "
      "Tensor(c!) exp_avg_sq, Tensor(d!)? master, str group_name, *, float lr, float beta1, "
      "float beta2, float eps, float weight_decay, int step, bool average, float grad_scale) "
      "-> ()");
  m.def(
      "reduce_scatter_update_all_gather_.lomo(Tensor(a!) param, Tensor grad, str group_name, *, "
      "float lr, float weight_decay, float? clip_value, bool average, float grad_scale) -> ()");
}

void implement_updates(torch::Library& m) {
  m.impl("reduce_scatter_update_all_gather_.sgd", update_sgd);
  m.impl("reduce_scatter_update_all_gather_.adamw", update_adamw);
  m.impl("reduce_scatter_update_all_gather_.lomo", update_lomo);
}

// The group's backend checks which tensors it can update.
TORCH_LIBRARY_IMPL(ringcomm, CPU, m) { implement_updates(m); }
TORCH_LIBRARY_IMPL(ringcomm, CUDA, m) { implement_updates(m); }
TORCH_LIBRARY_IMPL(ringcomm, PrivateUse1, m) { implement_updates(m); }

}  // namespace ringcomm
