#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

enum class OpKind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kReduceUpdateGather,
  kSend,
  kRecv
};
inline constexpr int kNumOpKinds = 12;
inline constexpr const char* kOpNames[kNumOpKinds] = {
    "barrier",   "all_reduce", "reduce",  "reduce_scatter", "all_gather",
    "broadcast", "gather",     "scatter", "all_to_all",     "reduce_scatter_update_all_gather",
    "send",      "recv"};

/// Of any number, because a peer's header may hold it.
constexpr const char* name_of(OpKind op) {
  const auto idx = static_cast<std::size_t>(op);
  return idx < kNumOpKinds ? kOpNames[idx] : "unknown op";
}

/// Whether the elements of the ranks become one.
constexpr bool is_reduction(OpKind op) {
  return op == OpKind::kAllReduce || op == OpKind::kReduce || op == OpKind::kReduceScatter ||
         op == OpKind::kReduceUpdateGather;
}

/// Whether a rank may have shards of sizes that no other rank knows.
constexpr bool has_private_sizes(OpKind op) {
  return op == OpKind::kGather || op == OpKind::kScatter || op == OpKind::kAllToAll;
}

}  // namespace ringcomm
