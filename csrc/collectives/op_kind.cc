#include "collectives/op_kind.h"

#include <array>
#include <cstddef>

namespace ringcomm {

namespace {

constexpr std::array<const char*, kNumOpKinds> kOpNames = {
    "barrier",   "all_reduce", "reduce",  "reduce_scatter", "all_gather",
    "broadcast", "gather",     "scatter", "all_to_all",     "reduce_scatter_update_all_gather",
    "send",      "recv"};

}  // namespace

// A peer's header may hold any number.
const char* name_of(OpKind op) {
  const auto idx = static_cast<std::size_t>(op);
  return idx < kOpNames.size() ? kOpNames[idx] : "unknown op";
}

bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceUpdateGather;
}

bool has_private_sizes(OpKind op) {
  return op == OpKind::kGather || op == OpKind::kScatter || op == OpKind::kAllToAll;
}

}  // namespace ringcomm
