#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/losses/softmax_merge.h"
#include "kernels/reductions/reduce_op.h"
#include "kernels/updates/update_op.h"
#include "kernels/updates/weight_update.h"

// Kernels are compiled for several instruction sets (simd.h), and one of them is chosen at run
// time:
//
//   "avx512"    AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later)
//   "avx2"      AVX2, F16C and FMA
//   "baseline"  what every processor has: SSE2 on x86-64, NEON on aarch64
//
// The kernels of a level are in a table that is constant-initialised: a constructor at load time
// would be compiled for that level, and run on processors without it.
//
// Internal to kernels/ and its tests, but for simd_level().

namespace ringcomm {

/// A token's logits on this rank. z = logit_scale * x, and with a softcap softcap * tanh(z /
/// softcap).
struct LogitRow {
  const void* logits = nullptr;
  std::size_t num_elems = 0;
  const float* weight = nullptr;  ///< of these classes; null: all 1
  std::int64_t target_idx = -1;   ///< in this row; -1: not here
  float logit_scale = 1;
  float softcap = 0;  ///< 0: none
  bool wants_weighted = false;
  bool wants_more = false;  ///< entropy and argmax
};

/// The gradient of a token's loss with respect to its logits x:
///
///     (prob * exp(z - max) - smooth * weight - [target] * target) * dz/dx
struct LogitGrad {
  float max = 0;
  float prob = 0;
  float smooth = 0;
  float target = 0;
};

/// The passes over a row of logits of one type; all arithmetic is fp32. Results depend on the
/// values alone, never on the instruction set. NaN and infinities go into them as in torch.
struct SoftmaxOps {
  /// Indices count from the row's beginning.
  SoftmaxStats (*stats)(const LogitRow& row) = nullptr;
  /// Writes num_elems elements of the logits' type, each rounded once, to nearest even. `to` may be
  /// the logits.
  void (*grad)(const LogitRow& row, const LogitGrad& grad, void* to) = nullptr;
};

/// A row of num_elems elements of one type at each address; `x` and `residual` are written.
struct NormRow {
  void* x = nullptr;
  void* residual = nullptr;
  const void* weight = nullptr;
  std::size_t num_elems = 0;
  float eps = 0;
};

/// residual = x + residual, then x = residual / sqrt(mean(residual^2) + eps) * weight. All
/// arithmetic is fp32, and each result is rounded once, to nearest even; the mean is that of the
/// rounded residual. Results depend on the values alone, never on the instruction set.
using AddRmsNorm = void (*)(const NormRow& row);

}  // namespace ringcomm

namespace ringcomm::cpu {

/// The level in use. The best that the processor has, unless the environment variable RINGCOMM_SIMD
/// names one; read once. Throws like choose_simd_level().
std::string_view simd_level();

/// What `requested` (the value of RINGCOMM_SIMD, null or empty if unset) selects. Throws
/// std::invalid_argument if it names an unknown level, or one that the processor lacks.
std::string_view choose_simd_level(const char* requested);

/// The types of logits, parameters and gradients, and their places in the tables.
inline constexpr DType kFloatDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
inline constexpr int kNumFloatDTypes = 3;

/// The place of a type, or -1.
constexpr int float_dtype_idx(DType dtype) {
  for (int i = 0; i < kNumFloatDTypes; ++i)
    if (kFloatDTypes[i] == dtype) return i;
  return -1;
}

/// The kernels of one level.
struct Kernels {
  const char* level = nullptr;
  /// Without combine() where the pair has no meaning.
  ReduceOp reductions[kNumReductions][kNumDTypes] = {};
  SoftmaxOps softmax[kNumFloatDTypes] = {};
  /// By parameter, gradient.
  decltype(UpdateOp::apply) updates[kNumOptimizers][kNumFloatDTypes][kNumFloatDTypes] = {};
  WeightOps weights[kNumWeightFormats][kNumFloatDTypes] = {};  ///< by gradient
  GradOps grads[kNumFloatDTypes] = {};
  AddRmsNorm add_rms_norm[kNumFloatDTypes] = {};
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// The kernels of a level, or null where this processor lacks it.
const Kernels* find_kernels(std::string_view level);
/// Those of the level in use.
const Kernels& kernels();

}  // namespace ringcomm::cpu
