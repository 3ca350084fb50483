#include "kernels/norms/torch_rms_norm.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/common/tables.h"
#include "kernels/torch_checks.h"

namespace ringcomm {

void check_add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                        const at::Tensor& weight, double eps) {
  constexpr const char* kOp = "all_reduce_add_rms_norm_";
  const std::pair<const at::Tensor&, const char*> tensors[] = {
      {input, "input"}, {residual, "residual"}, {weight, "weight"}};
  for (const auto& [tensor, name] : tensors) {
    check_float(tensor, name, kOp);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "ringcomm: ", kOp, " needs a contiguous ", name,
                      ", got strides ", tensor.strides(), " for shape ", tensor.sizes());
    TORCH_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), "ringcomm: ", kOp, " needs ",
                     name, " in the input's ", input.scalar_type(), ", got ", tensor.scalar_type());
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

void add_rms_norm_(const at::Tensor& input, const at::Tensor& residual, const at::Tensor& weight,
                   double eps) {
  const int64_t features = input.size(-1);
  const int64_t row_bytes = features * input.element_size();
  const AddRmsNorm add_rms_norm =
      cpu::kernels().add_rms_norm[cpu::float_dtype_idx(float_dtype_of(input))];
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

}  // namespace ringcomm
