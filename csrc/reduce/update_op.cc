#include "reduce/update_op.h"

#include <charconv>
#include <sstream>

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

}  // namespace

constinit MakeUpdateOp make_update_op = nullptr;

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

}  // namespace ringcomm
