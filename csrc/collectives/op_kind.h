#pragma once

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

const char* name_of(OpKind op);
/// Whether the elements of the ranks become one.
bool is_reduction(OpKind op);
/// Whether a rank may have shards of sizes that no other rank knows.
bool has_private_sizes(OpKind op);

}  // namespace ringcomm
