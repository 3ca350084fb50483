#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels/updates/torch_arguments.h"
#include "kernels/updates/update_op.h"

// torch.ops.ringcomm.optimizer_update_: the arithmetic of the fused
// update (csrc/bindings/fused_update.cc) without collectives.

namespace ringcomm {
namespace {

constexpr const char* kLocalName = "optimizer_update_";

void check_operand(const at::Tensor& tensor, const char* name, const at::Tensor& param) {
  check_tensor(tensor, kLocalName);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.numel() == param.numel(),
                    "ringcomm: ", kLocalName, " needs ", name, " contiguous and of ", param.numel(),
                    " elements, got shape ", tensor.sizes(), " with strides ", tensor.strides());
}

float* fp32_data(const at::Tensor& tensor, const char* name, const at::Tensor& param) {
  check_operand(tensor, name, param);
  check_dtype(tensor, at::kFloat, name, kLocalName);
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
    arrays.states[i] = fp32_data(tensors.states[i], state_name(spec, i), param);
    written.push_back(tensors.states[i]);
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

void optimizer_update_(const at::Tensor& param, const at::Tensor& grad, at::TensorList states,
                       const std::optional<at::Tensor>& master, const std::string& optimizer,
                       at::ArrayRef<double> numbers, bool nesterov, int64_t step,
                       double grad_scale) {
  const UpdateTensors tensors = {param, grad, states, master};
  UpdateSpec spec = update_spec_of(tensors, optimizer, numbers, nesterov, step, grad_scale);
  check_operand(param, "the parameters", param);
  check_operand(grad, "the gradient", param);
  check_float(param, "the parameters", kLocalName);
  check_float(grad, "the gradient", kLocalName);
  spec.param_dtype = float_dtype_of(param);
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
  tensors.mark_written();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "optimizer_update_(Tensor(a!) param, Tensor grad, Tensor(b!)[] states, Tensor(c!)? master, "
      "*, "
      "str optimizer, float[] numbers, bool nesterov, int step, float grad_scale) -> ()");
  m.impl(kLocalName, c10::DispatchKey::CPU, optimizer_update_);
}

}  // namespace ringcomm
