#include "kernels/rms_norm.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/tensors.h"
#include "ops/update_arguments.h"

// torch.ops.ringcomm.all_reduce_add_rms_norm_. Its fake and wrapper are in
// ringcomm/ops/rms_norm.py.

namespace py = pybind11;

namespace ringcomm {
namespace {

constexpr const char* kOp = "all_reduce_add_rms_norm_";

void check_arguments(const at::Tensor& input, const at::Tensor& residual, const at::Tensor& weight,
                     double eps) {
  const std::pair<const at::Tensor&, const char*> tensors[] = {
      {input, "input"}, {residual, "residual"}, {weight, "weight"}};
  for (const auto& [tensor, name] : tensors) {
    check_float(tensor, name, kOp);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "ringcomm: ", kOp, " needs a contiguous ", name,
                      ", got strides ", tensor.strides(), " for shape ", tensor.sizes());
    TORCH_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), "ringcomm: ", kOp, " needs ",
                     name, " in the input's ", input.scalar_type(), ", got ", tensor.scalar_type());
    TORCH_CHECK_VALUE(!(tensor.requires_grad() && at::GradMode::is_enabled()), "ringcomm: ", kOp,
                      " has no gradient, and its ", name,
                      " requires grad; use torch.inference_mode() or torch.no_grad()");
  }
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(-1) > 0, "ringcomm: ", kOp,
                    " needs an input of shape (..., features), got ", input.sizes());
  check_shape(residual, input.sizes(), "residual", kOp);
  check_shape(weight, {input.size(-1)}, "weight", kOp);
  check_apart(input, residual, kOp);
  check_apart(input, weight, kOp);
  check_apart(residual, weight, kOp);
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0, "ringcomm: ", kOp,
                    ": eps must be finite and 0 or more, got ", eps);
}

// The sum is in a cache when it is read again.
void reduce_and_norm(c10d::ProcessGroup& group, const at::Tensor& input, const at::Tensor& residual,
                     const at::Tensor& weight, double eps) {
  check_arguments(input, residual, weight, eps);
  all_reduce_in_place(group, input, c10d::ReduceOp::SUM);
  const int64_t features = input.size(-1);
  const int64_t row_bytes = features * input.element_size();
  const AddRmsNorm add_rms_norm = cpu::find_add_rms_norm(float_dtype_of(input));
  auto* const x = static_cast<char*>(input.data_ptr());
  auto* const sums = static_cast<char*>(residual.data_ptr());
  const void* const weights = weight.const_data_ptr();
  const int64_t grain = std::max<int64_t>(1, kGrainElems / features);
  at::parallel_for(0, input.numel() / features, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      add_rms_norm({.x = x + row * row_bytes,
                    .residual = sums + row * row_bytes,
                    .weight = weights,
                    .num_elems = static_cast<std::size_t>(features),
                    .eps = static_cast<float>(eps)});
  });
  mark_written(input);
  mark_written(residual);
}

void all_reduce_add_rms_norm_(const at::Tensor& input, const at::Tensor& residual,
                              const at::Tensor& weight, double eps, const std::string& group_name) {
  reduce_and_norm(*c10d::resolve_process_group(group_name), input, residual, weight, eps);
}

// False, and nothing is done, if the call must go through the dispatcher.
bool eager(py::handle input, py::handle residual, py::handle weight, double eps, py::handle group) {
  const at::Tensor* const x = find_eager(input.ptr());
  const at::Tensor* const sum = find_eager(residual.ptr());
  const at::Tensor* const scale = find_eager(weight.ptr());
  if (x == nullptr || sum == nullptr || scale == nullptr ||
      !py::isinstance<c10d::ProcessGroup>(group))
    return false;
  auto& all_backends = *py::cast<c10d::ProcessGroup*>(group);
  const py::gil_scoped_release no_gil;
  reduce_and_norm(all_backends, *x, *sum, *scale, eps);
  return true;
}

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "all_reduce_add_rms_norm_(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, "
      "str group_name) -> ()");
  m.impl("all_reduce_add_rms_norm_", c10::DispatchKey::CPU, all_reduce_add_rms_norm_);
}

}  // namespace

void define_rms_norm(py::module_& m) {
  m.def(kOp, &eager);
  // Arguments of other types: the dispatcher's errors are torch's.
  m.def(kOp, [](const py::args&) { return false; });
}

}  // namespace ringcomm
