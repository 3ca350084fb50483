#include "kernels/updates/torch_arguments.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/tables.h"
#include "kernels/updates/stochastic_rounding.h"

namespace ringcomm {
namespace {

bool is_at_least_0(double value) { return std::isfinite(value) && value >= 0; }

WeightFormat format_of(const at::Tensor& weight, bool has_low, std::int64_t rounding_seed,
                       const char* op) {
  check_float(weight, "weight", op, weight.device());
  const auto dtype = weight.scalar_type();
  TORCH_CHECK_VALUE(rounding_seed >= -1, "ringcomm: ", op,
                    ": rounding_seed must be 0 or more, or -1 for none, got ", rounding_seed);
  TORCH_CHECK_VALUE(rounding_seed < 0 || dtype == at::kBFloat16, "ringcomm: ", op,
                    " rounds stochastically to bfloat16 only, got a rounding_seed for a weight of ",
                    dtype);
  TORCH_CHECK_VALUE(!has_low || dtype == at::kBFloat16, "ringcomm: ", op,
                    " takes low for bfloat16 weights only, got it for ", dtype);
  TORCH_CHECK_VALUE(!has_low || rounding_seed < 0, "ringcomm: ", op,
                    " got both low and a rounding_seed; with low nothing is rounded off");
  if (has_low) return WeightFormat::kSplit;
  if (rounding_seed >= 0) return WeightFormat::kStochastic;
  switch (float_dtype_of(weight)) {
    case DType::kFloat32:
      return WeightFormat::kFloat32;
    case DType::kFloat16:
      return WeightFormat::kFloat16;
    default:
      return WeightFormat::kBFloat16;
  }
}

bool has_strides_of(const at::Tensor& tensor, const at::Tensor& other) {
  for (std::int64_t dim = 0; dim < other.dim(); ++dim)
    if (other.size(dim) > 1 && tensor.stride(dim) != other.stride(dim)) return false;
  return true;
}

}  // namespace

WeightStep weight_step_of(const UpdateOptions& options, const char* op) {
  const double clip = options.clip_value.value_or(std::numeric_limits<double>::infinity());
  TORCH_CHECK_VALUE(is_at_least_0(options.lr), "ringcomm: ", op,
                    ": lr must be finite and 0 or more, got ", options.lr);
  TORCH_CHECK_VALUE(is_at_least_0(options.weight_decay), "ringcomm: ", op,
                    ": weight_decay must be finite and 0 or more, got ", options.weight_decay);
  TORCH_CHECK_VALUE(std::isfinite(options.scale), "ringcomm: ", op, ": scale must be finite, got ",
                    options.scale);
  TORCH_CHECK_VALUE(clip > 0, "ringcomm: ", op, ": clip_value must be positive or None, got ",
                    clip);
  return {.scale = static_cast<float>(options.scale),
          .clip_value = static_cast<float>(clip),
          .lr_minus = static_cast<float>(-options.lr),
          .decay = static_cast<float>(1 - options.lr * options.weight_decay),
          .key = rounding_key(static_cast<std::uint64_t>(options.rounding_seed))};
}

const GradOps& grad_ops_of(const at::Tensor& grad) {
  return cpu::kernels().grads[cpu::float_dtype_idx(float_dtype_of(grad))];
}

void check_grad(const at::Tensor& grad, const at::Tensor& weight, const char* op) {
  check_float(grad, "grad", op, weight.device());
  check_shape(grad, weight.sizes(), "grad", op);
}

void check_first_elem(std::int64_t first_elem, const char* op) {
  TORCH_CHECK_VALUE(first_elem >= 0, "ringcomm: ", op, ": first_elem must be 0 or more, got ",
                    first_elem);
}

at::Tensor ordered_grad(const at::Tensor& grad, const at::Tensor& weight, const char* op) {
  check_grad(grad, weight, op);
  if (has_strides_of(grad, weight)) return grad;
  return at::empty_strided(weight.sizes(), weight.strides(), grad.options()).copy_(grad.detach());
}

void UpdateTensors::mark_written() const {
  ringcomm::mark_written(param);
  for (const at::Tensor& state : states) ringcomm::mark_written(state);
  if (master.has_value()) ringcomm::mark_written(*master);
}

UpdateSpec update_spec_of(const UpdateTensors& tensors, const std::string& optimizer,
                          at::ArrayRef<double> numbers, bool nesterov, std::int64_t step,
                          double grad_scale) {
  TORCH_CHECK_VALUE(step >= 1 && step <= std::numeric_limits<std::uint32_t>::max(),
                    "ringcomm: step must be 1 or more, got ", step);
  UpdateSpec spec = {.grad_scale = grad_scale,
                     .step = static_cast<std::uint32_t>(step),
                     .is_nesterov = nesterov,
                     .has_master = tensors.master.has_value()};
  for (const auto one : {Optimizer::kSgd, Optimizer::kAdamW, Optimizer::kLomo})
    if (optimizer == name_of(one)) spec.optimizer = one;
  TORCH_CHECK_VALUE(
      spec.optimizer != Optimizer::kNone && numbers.size() == 2 + num_coefficients(spec.optimizer),
      "ringcomm: there is no optimizer ", optimizer, " with ", numbers.size(), " numbers");
  spec.lr = numbers[0];
  spec.weight_decay = numbers[1];
  std::copy(numbers.begin() + 2, numbers.end(), spec.coefficients.begin());
  const auto wanted = static_cast<std::size_t>(num_states(spec));
  TORCH_CHECK_VALUE(tensors.states.size() == wanted, "ringcomm: ", optimizer, " needs ", wanted,
                    " states, got ", tensors.states.size());
  return spec;
}

UpdateArrays checked_arrays(const UpdateTensors& tensors, UpdateSpec& spec,
                            std::int64_t state_elems, const std::string& what, const char* op) {
  const auto& [param, grad, states, master] = tensors;
  std::vector<at::Tensor> all;
  const auto check = [&](const at::Tensor& tensor, const char* name) {
    check_tensor(tensor, op);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "ringcomm: ", op, " needs ", name,
                      " contiguous, got shape ", tensor.sizes(), " with strides ",
                      tensor.strides());
    for (const at::Tensor& other : all) check_apart(tensor, other, op);
    all.push_back(tensor);
  };
  const auto state_data = [&](const at::Tensor& tensor, const char* name) {
    check(tensor, name);
    check_dtype(tensor, at::kFloat, name, op, tensors.param.device());
    TORCH_CHECK_VALUE(tensor.numel() == state_elems, "ringcomm: ", op, " needs ", name, " to be ",
                      what, ", got ", tensor.numel(), " elements");
    return tensor.data_ptr<float>();
  };
  check(param, "the parameters");
  check_float(param, "the parameters", op, param.device());
  check(grad, "the gradient");
  check_float(grad, "the gradient", op, param.device());
  TORCH_CHECK_VALUE(grad.numel() == param.numel(), "ringcomm: ", op,
                    " needs a gradient of the parameters' shape, ", param.sizes(), ", got ",
                    grad.sizes());
  spec.param_dtype = float_dtype_of(param);
  UpdateArrays arrays{.param = param.data_ptr(), .grad = grad.const_data_ptr()};
  if (master.has_value()) arrays.master = state_data(*master, "master");
  const bool is_sgd = spec.optimizer == Optimizer::kSgd;
  for (std::size_t i = 0; i < states.size(); ++i)  // by their names in torch.optim
    arrays.states[i] = state_data(states[i], is_sgd   ? "momentum_buffer"
                                             : i == 0 ? "exp_avg"
                                                      : "exp_avg_sq");
  return arrays;
}

WeightArray::WeightArray(const at::Tensor& weight, const std::optional<at::Tensor>& low,
                         std::int64_t rounding_seed, bool is_matrix, const char* op)
    : weight_(weight),
      low_(low),
      format_(format_of(weight, low.has_value(), rounding_seed, op)),
      op_(op) {
  TORCH_CHECK_VALUE(is_matrix ? weight.dim() == 2 && weight.is_contiguous()
                              : weight.is_non_overlapping_and_dense(),
                    "ringcomm: ", op, " needs a ",
                    is_matrix ? "contiguous weight of two dimensions"
                              : "weight whose elements are contiguous in memory",
                    ", got shape ", weight.sizes(), " with strides ", weight.strides());
  if (!low.has_value()) return;
  check_dtype(*low, at::kShort, "low", op, weight.device());
  check_shape(*low, weight.sizes(), "low", op);
  TORCH_CHECK_VALUE(has_strides_of(*low, weight), "ringcomm: ", op,
                    " needs low with the weight's strides, ", weight.strides(), ", got ",
                    low->strides());
}

const WeightOps& WeightArray::ops(DType grad_dtype) const {
  return cpu::kernels().weights[static_cast<int>(format_)][cpu::float_dtype_idx(grad_dtype)];
}

WeightRun WeightArray::run(std::int64_t begin, std::int64_t num_elems) const {
  WeightRun run;
  run.weight = static_cast<char*>(weight_.data_ptr()) + begin * weight_.element_size();
  if (low_.has_value()) run.low = low_->data_ptr<std::int16_t>() + begin;
  run.first_elem = static_cast<std::uint64_t>(begin);
  run.num_elems = static_cast<std::size_t>(num_elems);
  return run;
}

void WeightArray::check_writable(const std::vector<at::Tensor>& read) const {
  if (low_.has_value()) check_apart(weight_, *low_, op_);
  for (const at::Tensor& tensor : read) {
    check_apart(weight_, tensor, op_);
    if (low_.has_value()) check_apart(*low_, tensor, op_);
  }
}

void WeightArray::mark_written() const {
  ringcomm::mark_written(weight_);
  if (low_.has_value()) ringcomm::mark_written(*low_);
}

}  // namespace ringcomm
