#pragma once

#include <cstdint>
#include <optional>

#include "device/cuda/call.h"
#include "device/cuda/loss_call.h"

namespace ringcomm::cuda {

/// One call of cross_entropy_and_grad_over_shards_: `loss` is of this rank's logits, its results
/// are those of all ranks.
struct ShardLossCall : KernelCall {
  LossCall loss;
  std::int64_t vocab_start = 0;  ///< the first class of this rank's logits
  /// A checksum that shows whether shards are contiguous: its sum over all ranks is that of one
  /// shard from 0 to vocab_size.
  float way = 0;
  float whole_way = 0;
};
static_assert(sizeof(ShardLossCall) <= 4096, "what a launch can carry");

/// Vectors of a row that a block of shards has, at most: 54 KiB, so that four rows fit.
inline constexpr unsigned kMaxShardVectors = 3456;

/// How a cluster divides this rank's part of a row.
struct ShardLossPlan {
  unsigned cluster_blocks = 1;
  std::uint32_t segment_vectors = 0;

  static constexpr unsigned shared_bytes(std::uint32_t segment_vectors) {
    return kLossHeadingBytes + kMaxRowSlots * segment_vectors * kVectorBytes;
  }
  constexpr unsigned shared_bytes() const { return shared_bytes(segment_vectors); }
};

/// The blocks of a cluster for shards of `vocab_size` classes over `world_size` ranks, equal on all
/// ranks: the smallest number that holds a shard an eighth longer than an even one. None if that is
/// too long for eight blocks or too short for one.
constexpr std::optional<unsigned> blocks_for_shards(std::int64_t vocab_size, int world_size,
                                                    std::int64_t element_bytes) {
  constexpr std::int64_t kMinShardBytes = 16 << 10;
  const std::int64_t even_bytes = (vocab_size + world_size - 1) / world_size * element_bytes;
  const std::int64_t num_vectors = (even_bytes + even_bytes / 8) / kVectorBytes + 2;
  if (even_bytes < kMinShardBytes) return std::nullopt;
  for (unsigned blocks = 1; blocks <= kMaxClusterBlocks; blocks *= 2)
    if (num_vectors <= std::int64_t{blocks} * kMaxShardVectors) return blocks;
  return std::nullopt;
}

/// This rank's plan: none if its part of a row does not fit such clusters. A row that is not
/// aligned to 16 bytes uses one more vector.
constexpr std::optional<ShardLossPlan> plan_shard(std::int64_t row_bytes, unsigned cluster_blocks) {
  const std::int64_t num_vectors = (row_bytes + kVectorBytes - 1) / kVectorBytes + 1;
  const std::int64_t segment = (num_vectors + cluster_blocks - 1) / cluster_blocks;
  if (segment > kMaxShardVectors) return std::nullopt;
  return ShardLossPlan{.cluster_blocks = cluster_blocks,
                       .segment_vectors = static_cast<std::uint32_t>(segment)};
}

}  // namespace ringcomm::cuda
