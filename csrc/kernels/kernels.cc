#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/kernel_tables.h"
#include "reduce/reduce_op.h"

namespace ringcomm::host {
namespace {

const Kernels& kernels() {
  static const Kernels& chosen = *find_kernels(simd_level());
  return chosen;
}

}  // namespace

const Kernels* find_kernels(std::string_view level) {
  if (find_simd_kernels(level) == nullptr) return nullptr;
#if defined(__x86_64__)
  if (level == "avx512") return &kAvx512FloatKernels;
  if (level == "avx2") return &kAvx2FloatKernels;
#endif
  return &kBaselineFloatKernels;
}

const SoftmaxOps* find_softmax_ops(DType dtype) {
  const int idx = float_dtype_idx(dtype);
  return idx < 0 ? nullptr : &kernels().softmax[idx];
}

const WeightOps* find_weight_ops(WeightFormat format, DType grad_dtype) {
  const int idx = float_dtype_idx(grad_dtype);
  return idx < 0 ? nullptr : &kernels().weights[static_cast<std::size_t>(format)][idx];
}

const GradOps* find_grad_ops(DType grad_dtype) {
  const int idx = float_dtype_idx(grad_dtype);
  return idx < 0 ? nullptr : &kernels().grads[idx];
}

UpdateOp make_update_op(const UpdateSpec& spec, DType grad_dtype) {
  const UpdateScalars scalars = scalars_of(spec);
  const int param_idx = float_dtype_idx(spec.param_dtype);
  const int grad_idx = float_dtype_idx(grad_dtype);
  if (param_idx < 0 || grad_idx < 0)
    throw std::invalid_argument(
        std::string("parameters and gradients must be float32, float16 or bfloat16, got ") +
        name_of(spec.param_dtype) + " and " + name_of(grad_dtype));
  return {.scalars = scalars,
          .apply = kernels().updates[static_cast<int>(spec.optimizer)][param_idx][grad_idx]};
}

}  // namespace ringcomm::host
