#include "cuda/collectives/plan_cache.h"

#include <cstdint>

namespace ringcomm::cuda {
namespace {

std::size_t hash_of(const CallHeader& header) {
  const std::uint64_t type =
      static_cast<std::uint64_t>(header.dtype) * 16 + static_cast<std::uint64_t>(header.reduction);
  return static_cast<std::size_t>((header.num_elems * 256 + type) * 0x9e3779b97f4a7c15u >> 32);
}

}  // namespace

PlannedCall& PlanCache::plan(const Collective& call, const CallHeader& header) {
  const HeaderWords words = to_words(header);
  const bool is_kept = call.op == OpKind::kAllReduce;
  PlannedCall& planned = is_kept ? kept_[hash_of(header) % kNumKept] : other_;
  if (is_kept && planned.kernel != nullptr && planned.header == words) {
    planned.call.inputs[0] = static_cast<const std::byte*>(call.inputs[0]);
    planned.call.outputs[0] = static_cast<std::byte*>(call.outputs[0]);
    return planned;
  }
  planned.kernel = nullptr;  // of nothing, should the rest throw
  planned.header = words;
  planned.call = {};
  static_cast<GroupFrame&>(planned.call) = frame_;
  planned.plan = plan_launch(call, header, planned.call);
  planned.kernel = kernels_.find(planned.plan.kernel);
  return planned;
}

}  // namespace ringcomm::cuda
