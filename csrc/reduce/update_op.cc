#include "reduce/update_op.h"

#include <charconv>
#include <sstream>

namespace ringcomm {
namespace {

struct OptimizerInfo {
  const char* name;
  std::array<const char*, 3> coefficients;  // null from the first that there is not
};

constexpr OptimizerInfo kInfos[kNumOptimizers] = {
    {"none", {}},
    {"sgd", {"momentum", "dampening", nullptr}},
    {"adamw", {"beta1", "beta2", "eps"}},
    {"lomo", {"clip_value", nullptr, nullptr}},
};

const OptimizerInfo& info_of(const UpdateSpec& spec) {
  return kInfos[static_cast<std::size_t>(spec.optimizer)];
}

// The fewest digits that identify the number, so that values that differ between ranks also look
// different.
std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace

constinit MakeUpdateOp make_update_op = nullptr;

std::string describe(const UpdateSpec& spec) {
  const OptimizerInfo& info = info_of(spec);
  std::ostringstream text;
  text << info.name << " step " << spec.step << " of " << name_of(spec.param_dtype) << " parameters"
       << (spec.has_master ? " with master" : "") << ", lr=" << shortest(spec.lr)
       << ", weight_decay=" << shortest(spec.weight_decay)
       << ", grad_scale=" << shortest(spec.grad_scale);
  for (std::size_t i = 0; i < info.coefficients.size() && info.coefficients[i] != nullptr; ++i)
    text << ", " << info.coefficients[i] << "=" << shortest(spec.coefficients[i]);
  if (spec.is_nesterov) text << ", nesterov";
  return text.str();
}

int num_states(const UpdateSpec& spec) {
  if (spec.optimizer == Optimizer::kAdamW) return 2;
  return spec.optimizer == Optimizer::kSgd && spec.coefficients[sgd::kMomentum] != 0 ? 1 : 0;
}

}  // namespace ringcomm
