#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/op_support.h"
#include "bindings/tensors.h"
#include "ops/weight_update.h"
#include "reduce/update_op.h"

// torch.ops.ringcomm.optimizer_update_: an optimizer step on one rank's weights, with an overload
// for each optimizer. The fused update's arithmetic, without its collectives. Fakes and the wrapper
// are in ringcomm/ops/updates/fused_update.py.

namespace ringcomm {
namespace {

constexpr const char* kUpdateName = "optimizer_update_";

using NamedState = std::pair<const char*, std::optional<at::Tensor>>;

void check_operand(const at::Tensor& tensor, const char* name, const at::Tensor& param) {
  check_tensor(tensor, kUpdateName);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_neg() && tensor.numel() == param.numel(),
                    "ringcomm: ", kUpdateName, " needs ", name, " contiguous and of ",
                    param.numel(), " elements, got shape ", tensor.sizes(), " with strides ",
                    tensor.strides());
}

float* fp32_data(const at::Tensor& tensor, const char* name, const at::Tensor& param) {
  check_operand(tensor, name, param);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "ringcomm: ", kUpdateName, " needs ", name,
                   " in float32, got ", tensor.scalar_type());
  return tensor.data_ptr<float>();
}

void update(const at::Tensor& param, const at::Tensor& grad,
            const std::optional<at::Tensor>& master, const std::array<NamedState, 2>& states,
            UpdateSpec spec, int64_t step) {
  TORCH_CHECK_VALUE(step >= 1 && step <= std::numeric_limits<std::uint32_t>::max(),
                    "ringcomm: ", kUpdateName, ": step must be 1 or more, got ", step);
  check_no_grad(param, kUpdateName, "");
  check_operand(param, "the parameters", param);
  check_operand(grad, "the gradient", param);
  check_float(param, "the parameters", kUpdateName);
  check_float(grad, "the gradient", kUpdateName);
  spec.step = static_cast<std::uint32_t>(step);
  spec.param_dtype = reduced_dtype(param, kUpdateName);
  spec.has_master = master.has_value();
  std::vector<at::Tensor> operands = {param, grad};
  UpdateArrays whole = {.param = param.data_ptr(), .grad = grad.const_data_ptr()};
  if (master.has_value()) {
    whole.master = fp32_data(*master, "master", param);
    operands.push_back(*master);
  }
  for (int i = 0; i < 2; ++i) {
    const auto& [name, state] = states[i];
    const bool is_needed = i < num_states(spec);
    TORCH_CHECK_VALUE(state.has_value() == is_needed, "ringcomm: ", kUpdateName,
                      is_needed ? " needs " : " does not take ", name, " in ", describe(spec));
    if (!is_needed) continue;
    whole.states[i] = fp32_data(*state, name, param);
    operands.push_back(*state);
  }
  for (std::size_t i = 0; i < operands.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) check_apart(operands[i], operands[j], kUpdateName);

  UpdateOp op;
  try {
    op = make_update_op(spec, reduced_dtype(grad, kUpdateName));
  } catch (const std::invalid_argument& error) {  // which torch 2.15 makes a RuntimeError
    TORCH_CHECK_VALUE(false, error.what());
  }
  const int64_t param_bytes = param.element_size();
  const int64_t grad_bytes = grad.element_size();
  at::parallel_for(0, param.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    UpdateArrays part = whole;
    part.param = static_cast<char*>(whole.param) + begin * param_bytes;
    part.grad = static_cast<const char*>(whole.grad) + begin * grad_bytes;
    if (part.master != nullptr) part.master += begin;
    for (float*& state : part.states)
      if (state != nullptr) state += begin;
    op.apply(op.scalars, part, static_cast<std::size_t>(end - begin));
  });
  operands.erase(operands.begin() + 1);
  for (const at::Tensor& written : operands) mark_written(written);
}

void step_sgd(const at::Tensor& param, const at::Tensor& grad,
              const std::optional<at::Tensor>& momentum_buffer,
              const std::optional<at::Tensor>& master, double lr, double momentum, double dampening,
              double weight_decay, bool nesterov, int64_t step, double grad_scale) {
  update(param, grad, master, {{{"momentum_buffer", momentum_buffer}, {"", std::nullopt}}},
         {.lr = lr,
          .weight_decay = weight_decay,
          .grad_scale = grad_scale,
          .coefficients = {momentum, dampening},
          .optimizer = Optimizer::kSgd,
          .is_nesterov = nesterov},
         step);
}

void step_adamw(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& master, double lr,
                double beta1, double beta2, double eps, double weight_decay, int64_t step,
                double grad_scale) {
  update(param, grad, master, {{{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}},
         {.lr = lr,
          .weight_decay = weight_decay,
          .grad_scale = grad_scale,
          .coefficients = {beta1, beta2, eps},
          .optimizer = Optimizer::kAdamW},
         step);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "optimizer_update_.sgd(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, "
      "Tensor(c!)? master, *, float lr, float momentum, float dampening, float weight_decay, "
      "bool nesterov, int step, float grad_scale) -> ()");
  m.def(
      "optimizer_update_.adamw(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, "
      "Tensor(c!) exp_avg_sq, Tensor(d!)? master, *, float lr, float beta1, float beta2, float "
      "eps, "
      "float weight_decay, int step, float grad_scale) -> ()");
}

TORCH_LIBRARY_IMPL(ringcomm, CPU, m) {
  m.impl("optimizer_update_.sgd", step_sgd);
  m.impl("optimizer_update_.adamw", step_adamw);
}

}  // namespace ringcomm
