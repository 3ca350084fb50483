#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/tensors.h"
#include "ops/update_arguments.h"
#include "reduce/update_op.h"

// torch.ops.ringcomm.reduce_scatter_update_all_gather_ (the fused update) and optimizer_update_
// (its arithmetic on one rank's weights, without collectives), an overload for each optimizer.
// Fakes and the wrappers are in ringcomm/ops/fused_update.py.

namespace ringcomm {
namespace {

constexpr const char* kLocalName = "optimizer_update_";

using OptionalTensor = std::optional<at::Tensor>;

std::uint32_t checked_step(int64_t step, const char* prefix) {
  TORCH_CHECK_VALUE(step >= 1 && step <= std::numeric_limits<std::uint32_t>::max(),
                    "ringcomm: ", prefix, "step must be 1 or more, got ", step);
  return static_cast<std::uint32_t>(step);
}

void fused_sgd(const at::Tensor& param, const at::Tensor& grad,
               const OptionalTensor& momentum_buffer, const OptionalTensor& master,
               const std::string& group_name, double lr, double momentum, double dampening,
               double weight_decay, bool nesterov, int64_t step, bool average, double grad_scale) {
  reduce_update_gather(group_name, {param, grad, master, {{"momentum_buffer", momentum_buffer}}},
                       {.lr = lr,
                        .weight_decay = weight_decay,
                        .grad_scale = grad_scale,
                        .coefficients = {momentum, dampening},
                        .step = checked_step(step, ""),
                        .optimizer = Optimizer::kSgd,
                        .is_nesterov = nesterov},
                       average);
}

void fused_adamw(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const OptionalTensor& master,
                 const std::string& group_name, double lr, double beta1, double beta2, double eps,
                 double weight_decay, int64_t step, bool average, double grad_scale) {
  reduce_update_gather(group_name,
                       {param, grad, master, {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}},
                       {.lr = lr,
                        .weight_decay = weight_decay,
                        .grad_scale = grad_scale,
                        .coefficients = {beta1, beta2, eps},
                        .step = checked_step(step, ""),
                        .optimizer = Optimizer::kAdamW},
                       average);
}

void fused_lomo(const at::Tensor& param, const at::Tensor& grad, const std::string& group_name,
                double lr, double weight_decay, std::optional<double> clip_value, bool average,
                double grad_scale) {
  TORCH_CHECK_VALUE(!clip_value.has_value() || *clip_value > 0,
                    "ringcomm: clip_value must be positive or None, got ", clip_value.value_or(0));
  reduce_update_gather(group_name, {param, grad, std::nullopt, {}},
                       {.lr = lr,
                        .weight_decay = weight_decay,
                        .grad_scale = grad_scale,
                        .coefficients = {clip_value.value_or(0)},
                        .step = 1,  // without state, every step is like the first
                        .optimizer = Optimizer::kLomo},
                       average);
}

void check_operand(const at::Tensor& tensor, const char* name, const at::Tensor& param) {
  check_tensor(tensor, kLocalName);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_neg() && tensor.numel() == param.numel(),
                    "ringcomm: ", kLocalName, " needs ", name, " contiguous and of ", param.numel(),
                    " elements, got shape ", tensor.sizes(), " with strides ", tensor.strides());
}

float* fp32_data(const at::Tensor& tensor, const char* name, const at::Tensor& param) {
  check_operand(tensor, name, param);
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "ringcomm: ", kLocalName, " needs ", name,
                   " in float32, got ", tensor.scalar_type());
  return tensor.data_ptr<float>();
}

// The arrays of a step, checked; the tensors that it writes go to `written`.
UpdateArrays arrays_of(const UpdateTensors& tensors, const UpdateSpec& spec,
                       std::vector<at::Tensor>& written) {
  const at::Tensor& param = tensors.param;
  written = {param};
  UpdateArrays arrays = {.param = param.data_ptr(), .grad = tensors.grad.const_data_ptr()};
  if (tensors.master.has_value()) {
    arrays.master = fp32_data(*tensors.master, "master", param);
    written.push_back(*tensors.master);
  }
  for (std::size_t i = 0; i < tensors.states.size(); ++i) {
    const auto& [name, state] = tensors.states[i];
    const bool is_needed = i < static_cast<std::size_t>(num_states(spec));
    TORCH_CHECK_VALUE(state.has_value() == is_needed, "ringcomm: ", kLocalName,
                      is_needed ? " needs " : " does not take ", name, " in ", describe(spec));
    if (!is_needed) continue;
    arrays.states[i] = fp32_data(*state, name, param);
    written.push_back(*state);
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    check_apart(written[i], tensors.grad, kLocalName);
    for (std::size_t j = 0; j < i; ++j) check_apart(written[i], written[j], kLocalName);
  }
  return arrays;
}

UpdateOp checked_update_op(const UpdateSpec& spec, DType grad_dtype) {
  try {
    return make_update_op(spec, grad_dtype);
  } catch (const std::invalid_argument& error) {  // which torch 2.15 makes a RuntimeError
    TORCH_CHECK_VALUE(false, error.what());
  }
}

void update_local(const UpdateTensors& tensors, UpdateSpec spec, int64_t step) {
  const at::Tensor &param = tensors.param, &grad = tensors.grad;
  spec.step = checked_step(step, "optimizer_update_: ");
  check_no_grad(param, kLocalName, "");
  check_operand(param, "the parameters", param);
  check_operand(grad, "the gradient", param);
  check_float(param, "the parameters", kLocalName);
  check_float(grad, "the gradient", kLocalName);
  spec.param_dtype = float_dtype_of(param);
  spec.has_master = tensors.master.has_value();
  std::vector<at::Tensor> written;
  const UpdateArrays whole = arrays_of(tensors, spec, written);
  const UpdateOp op = checked_update_op(spec, float_dtype_of(grad));
  at::parallel_for(0, param.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    UpdateArrays part = whole;
    part.param = static_cast<char*>(whole.param) + begin * param.element_size();
    part.grad = static_cast<const char*>(whole.grad) + begin * grad.element_size();
    if (part.master != nullptr) part.master += begin;
    for (float*& state : part.states)
      if (state != nullptr) state += begin;
    op.apply(op.scalars, part, static_cast<std::size_t>(end - begin));
  });
  for (const at::Tensor& tensor : written) mark_written(tensor);
}

void local_sgd(const at::Tensor& param, const at::Tensor& grad,
               const OptionalTensor& momentum_buffer, const OptionalTensor& master, double lr,
               double momentum, double dampening, double weight_decay, bool nesterov, int64_t step,
               double grad_scale) {
  update_local({param, grad, master, {{"momentum_buffer", momentum_buffer}}},
               {.lr = lr,
                .weight_decay = weight_decay,
                .grad_scale = grad_scale,
                .coefficients = {momentum, dampening},
                .optimizer = Optimizer::kSgd,
                .is_nesterov = nesterov},
               step);
}

void local_adamw(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const OptionalTensor& master, double lr,
                 double beta1, double beta2, double eps, double weight_decay, int64_t step,
                 double grad_scale) {
  update_local({param, grad, master, {{"exp_avg", exp_avg}, {"exp_avg_sq", exp_avg_sq}}},
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
  m.def(
      "optimizer_update_.sgd(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, "
      "Tensor(c!)? master, *, float lr, float momentum, float dampening, float weight_decay, "
      "bool nesterov, int step, float grad_scale) -> ()");
  m.def(
      "optimizer_update_.adamw(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, "
      "Tensor(c!) exp_avg_sq, Tensor(d!)? master, *, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, int step, float grad_scale) -> ()");
}

void implement_fused(torch::Library& m) {
  m.impl("reduce_scatter_update_all_gather_.sgd", fused_sgd);
  m.impl("reduce_scatter_update_all_gather_.adamw", fused_adamw);
  m.impl("reduce_scatter_update_all_gather_.lomo", fused_lomo);
}

// The group's backend checks which tensors it can update.
TORCH_LIBRARY_IMPL(ringcomm, CUDA, m) { implement_fused(m); }
TORCH_LIBRARY_IMPL(ringcomm, PrivateUse1, m) { implement_fused(m); }
TORCH_LIBRARY_IMPL(ringcomm, CPU, m) {
  implement_fused(m);
  m.impl("optimizer_update_.sgd", local_sgd);
  m.impl("optimizer_update_.adamw", local_adamw);
}

}  // namespace ringcomm
