#include "kernels/updates/update_op.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "kernels/common/tables.h"

namespace ringcomm {
namespace {

// Of each optimizer: its own, and its coefficients'.
constexpr const char* kNames[kNumOptimizers][4] = {{"none"},
                                                   {"sgd", "momentum", "dampening"},
                                                   {"adamw", "beta1", "beta2", "eps"},
                                                   {"lomo", "clip_value"}};

// The fewest digits that identify the number: values that differ between ranks look different.
std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
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

const char* name_of(Optimizer optimizer) { return kNames[static_cast<std::size_t>(optimizer)][0]; }

std::size_t num_coefficients(Optimizer optimizer) {
  const auto& names = kNames[static_cast<std::size_t>(optimizer)];
  return static_cast<std::size_t>(std::ranges::count_if(names, [](auto* name) { return name; })) -
         1;
}

std::string describe(const UpdateSpec& spec) {
  const auto& names = kNames[static_cast<std::size_t>(spec.optimizer)];
  std::ostringstream text;
  text << names[0] << " step " << spec.step << " of " << name_of(spec.param_dtype) << " parameters"
       << (spec.has_master ? " with master" : "") << ", lr=" << shortest(spec.lr)
       << ", weight_decay=" << shortest(spec.weight_decay)
       << ", grad_scale=" << shortest(spec.grad_scale);
  for (std::size_t i = 0; i < spec.coefficients.size() && names[i + 1] != nullptr; ++i)
    text << ", " << names[i + 1] << "=" << shortest(spec.coefficients[i]);
  if (spec.is_nesterov) text << ", nesterov";
  return text.str();
}

int num_states(const UpdateSpec& spec) {
  if (spec.optimizer == Optimizer::kAdamW) return 2;
  return spec.optimizer == Optimizer::kSgd && spec.coefficients[sgd::kMomentum] != 0 ? 1 : 0;
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
  const int param_idx = cpu::float_dtype_idx(spec.param_dtype);
  const int grad_idx = cpu::float_dtype_idx(grad_dtype);
  if (param_idx < 0 || grad_idx < 0)
    throw std::invalid_argument(
        std::string("parameters and gradients must be float32, float16 or bfloat16, got ") +
        name_of(spec.param_dtype) + " and " + name_of(grad_dtype));
  return {.scalars = scalars,
          .apply = cpu::kernels().updates[static_cast<int>(spec.optimizer)][param_idx][grad_idx]};
}

}  // namespace ringcomm
