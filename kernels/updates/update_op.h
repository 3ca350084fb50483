#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/types.h"

namespace ringcomm {

enum class Optimizer : std::uint8_t { kNone, kSgd, kAdamW, kLomo };
inline constexpr int kNumOptimizers = 4;

/// The indices of an optimizer's own coefficients in UpdateSpec.
namespace sgd {
inline constexpr std::size_t kMomentum = 0, kDampening = 1;
}
namespace adamw {
inline constexpr std::size_t kBeta1 = 0, kBeta2 = 1, kEps = 2;
}
namespace lomo {
inline constexpr std::size_t kClipValue = 0;  ///< 0: no clipping
}

/// One optimizer step; must be equal on all ranks. Plain data, because it is part of the call's
/// header.
struct UpdateSpec {
  double lr = 0;
  double weight_decay = 0;
  double grad_scale = 1;  ///< multiplies the reduced gradient before anything else
  std::array<double, 3> coefficients = {};
  std::uint32_t step = 0;  ///< 1 in the first update
  Optimizer optimizer = Optimizer::kNone;
  DType param_dtype = DType::kFloat32;
  bool is_nesterov = false;
  bool has_master = false;  ///< 16-bit parameters are the rounded form of an fp32 state

  friend bool operator==(const UpdateSpec&, const UpdateSpec&) = default;
};

/// "sgd"
const char* name_of(Optimizer optimizer);
/// The number of its own coefficients.
std::size_t num_coefficients(Optimizer optimizer);
/// "sgd step 3, lr=0.1, momentum=0.9, ..."
std::string describe(const UpdateSpec& spec);
/// The number of fp32 state arrays besides the parameters and their master: momentum; first and
/// second moment; none.
int num_states(const UpdateSpec& spec);

/// The operands of one update, all with the same number of elements. No alignment is required.
struct UpdateArrays {
  void* param = nullptr;
  const void* grad = nullptr;  ///< reduced
  float* master = nullptr;     ///< null unless spec.has_master; `param` is its rounded form
  std::array<float*, 2> states = {};
};

/// The kernels' scalars of a spec: computed in double and rounded once, like torch.optim.
struct UpdateScalars {
  float grad_scale;
  float lr_minus;      ///< the negative step size
  float decay;         ///< 1 - lr * weight_decay (adamw, lomo)
  float weight_decay;  ///< added to the gradient (sgd)
  float momentum, damped;
  bool is_first, is_nesterov;
  float lerp_weight, beta2, beta2_rest, bias_sqrt, eps;
  float clip_value;  ///< infinity if there is none
};

/// A step of an optimizer on arrays: an entry of the registry with its scalars, made once per call.
///
/// sgd and adamw do what torch.optim.SGD and torch.optim.AdamW do (without amsgrad, maximize), in
/// the same order of operations; lomo is W <- (1 - lr * weight_decay) * W - lr * g with g clamped
/// to +-clip_value. All arithmetic is fp32; 16-bit parameters are rounded once, to nearest even.
/// Infinities and NaN in the gradient go into parameters and state as in torch.
///
/// The result depends on the values alone, never on the instruction set that was chosen.
struct UpdateOp {
  UpdateScalars scalars;
  void (*apply)(const UpdateScalars& scalars, const UpdateArrays& arrays,
                std::size_t num_elems) = nullptr;
};

/// Makes the step for this processor. Throws std::invalid_argument, naming the value, where the
/// spec is not one of a step, or parameters or gradients are no floats of 16 or 32 bits.
UpdateOp make_update_op(const UpdateSpec& spec, DType grad_dtype);
/// Its checks of the spec, and its scalars.
UpdateScalars scalars_of(const UpdateSpec& spec);

}  // namespace ringcomm
