#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/kernel_tables.h"
#include "reduce/reduce_op.h"

namespace ringcomm::cpu {
namespace {

const Kernels& kernels() {
  static const Kernels& chosen = *find_kernels(simd_level());
  return chosen;
}

void check(bool is_true, const UpdateSpec& spec, const char* what) {
  if (!is_true) throw std::invalid_argument(std::string(what) + ", got " + describe(spec));
}

bool is_at_least_0(double value) { return std::isfinite(value) && value >= 0; }

void check_spec(const UpdateSpec& spec) {
  const auto& own = spec.coefficients;
  check(spec.optimizer != Optimizer::kNone, spec, "an update needs an optimizer");
  check(spec.step >= 1, spec, "step must be 1 or more");
  check(is_at_least_0(spec.lr), spec, "lr must be finite and 0 or more");
  check(is_at_least_0(spec.weight_decay), spec, "weight_decay must be finite and 0 or more");
  check(std::isfinite(spec.grad_scale), spec, "grad_scale must be finite");
  check(!spec.has_master || spec.param_dtype != DType::kFloat32, spec,
        "master weights are for 16-bit parameters");
  if (spec.optimizer == Optimizer::kSgd) {
    check(is_at_least_0(own[sgd::kMomentum]), spec, "momentum must be finite and 0 or more");
    check(std::isfinite(own[sgd::kDampening]), spec, "dampening must be finite");
    check(!spec.is_nesterov || (own[sgd::kMomentum] > 0 && own[sgd::kDampening] == 0), spec,
          "nesterov needs a momentum and no dampening");
  } else if (spec.optimizer == Optimizer::kAdamW) {
    for (const double beta : {own[adamw::kBeta1], own[adamw::kBeta2]})
      check(beta >= 0 && beta < 1, spec, "betas must be 0 or more and less than 1");
    check(is_at_least_0(own[adamw::kEps]), spec, "eps must be finite and 0 or more");
  } else {
    check(own[lomo::kClipValue] >= 0, spec, "clip_value must be positive, or 0 for none");
  }
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

AddRmsNorm find_add_rms_norm(DType dtype) {
  const int idx = float_dtype_idx(dtype);
  return idx < 0 ? nullptr : kernels().add_rms_norm[idx];
}

UpdateScalars scalars_of(const UpdateSpec& spec) {
  check_spec(spec);
  const auto& own = spec.coefficients;
  const auto rounded = [](double value) { return static_cast<float>(value); };
  UpdateScalars s = {};
  s.grad_scale = rounded(spec.grad_scale);
  s.lr_minus = rounded(-spec.lr);
  s.decay = rounded(1 - spec.lr * spec.weight_decay);
  s.weight_decay = rounded(spec.weight_decay);
  s.is_first = spec.step == 1;
  s.is_nesterov = spec.is_nesterov;
  if (spec.optimizer == Optimizer::kSgd) {
    s.momentum = rounded(own[sgd::kMomentum]);
    s.damped = rounded(1 - own[sgd::kDampening]);
  } else if (spec.optimizer == Optimizer::kAdamW) {
    s.lr_minus = rounded(-(spec.lr / (1 - std::pow(own[adamw::kBeta1], spec.step))));
    s.lerp_weight = rounded(1 - own[adamw::kBeta1]);
    s.beta2 = rounded(own[adamw::kBeta2]);
    s.beta2_rest = rounded(1 - own[adamw::kBeta2]);
    s.bias_sqrt = rounded(std::sqrt(1 - std::pow(own[adamw::kBeta2], spec.step)));
    s.eps = rounded(own[adamw::kEps]);
  } else {
    const double clip = own[lomo::kClipValue];
    s.clip_value = clip > 0 ? rounded(clip) : std::numeric_limits<float>::infinity();
  }
  return s;
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

namespace {

[[maybe_unused]] const bool is_registered = [] {
  ringcomm::make_update_op = &cpu::make_update_op;
  return true;
}();

}  // namespace
}  // namespace ringcomm::cpu
