#include "kernels/softmax.h"

#include <cstring>

#include "kernels/softmax_tables.h"
#include "reduce/simd_tables.h"

namespace ringcomm::host {

const SoftmaxKernels* find_softmax_kernels(const char* level) {
  if (find_simd_kernels(level) == nullptr) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(level, "avx512") == 0) return &kAvx512Softmax;
  if (std::strcmp(level, "avx2") == 0) return &kAvx2Softmax;
#endif
  return &kBaselineSoftmax;
}

const SoftmaxOps* find_softmax_ops(const SoftmaxKernels& kernels, DType dtype) {
  for (int i = 0; i < kNumLogitDTypes; ++i)
    if (kLogitDTypes[i] == dtype) return &kernels.of[i];
  return nullptr;
}

const SoftmaxOps* find_softmax_ops(DType dtype) {
  static const SoftmaxKernels& kernels = *find_softmax_kernels(simd_kernels().level);
  return find_softmax_ops(kernels, dtype);
}

}  // namespace ringcomm::host
