#include "kernels/weight_update.h"

#include <cstring>

#include "kernels/weight_update_tables.h"
#include "reduce/simd_tables.h"

namespace ringcomm::host {
namespace {

const WeightKernels& weight_kernels() {
  static const WeightKernels& kernels = *find_weight_kernels(simd_kernels().level);
  return kernels;
}

}  // namespace

const WeightKernels* find_weight_kernels(const char* level) {
  if (find_simd_kernels(level) == nullptr) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(level, "avx512") == 0) return &kAvx512Weights;
  if (std::strcmp(level, "avx2") == 0) return &kAvx2Weights;
#endif
  return &kBaselineWeights;
}

const WeightOps* find_weight_ops(WeightFormat format, DType grad_dtype) {
  const int grad_idx = update_dtype_idx(grad_dtype);
  return grad_idx < 0 ? nullptr
                      : &weight_kernels().weights[static_cast<std::size_t>(format)][grad_idx];
}

const GradOps* find_grad_ops(DType grad_dtype) {
  const int grad_idx = update_dtype_idx(grad_dtype);
  return grad_idx < 0 ? nullptr : &weight_kernels().grads[grad_idx];
}

}  // namespace ringcomm::host
