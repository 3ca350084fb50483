#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "device/cuda/limits.h"
#include "device/cuda/loss_call.h"

namespace ringcomm::cuda {

/// Of some logits of a row.
struct LossPart {
  float max;     ///< the lowest number without any above -infinity
  float sum;     ///< of exp(logit_scale * (x - max))
  float total;   ///< of x, for label smoothing
  float target;  ///< x of the target, where it is exchanged: 0 in parts without it
};
static_assert(sizeof(LossPart) == kVectorBytes);

/// In front of the slots in shared memory.
struct LossHeading {
  std::uint64_t loaded[kMaxRowSlots];        ///< barriers of a GPU's block
  std::uint64_t exchanged[kNumExchanges];    ///< the same
  LossPart of_blocks[2][kMaxClusterBlocks];  ///< of two rows in turn
  LossPart of_warps[32];
  double counts[32];
  LossPart of_all_ranks[2];  ///< of two rows in turn, where ranks have shards
  LossPart of_ranks[kMaxRanks];
};
static_assert(sizeof(LossHeading) <= kLossHeadingBytes);

/// What a block of threads must offer for loss_rows.h to run on it: a place in a cluster of blocks
/// that see each other's shared memory, and copies between global and shared memory that go on
/// while the threads compute. gpu_row_block.cuh is one of a GPU, and tests have one of the host's
/// threads.
///
/// - kVectorsPerThread times num_threads vectors are no less than a call's segment_vectors.
/// - sync is the barrier of the block's threads. start() is one of all threads of the cluster; what
///   was written before a barrier is seen behind it.
/// - warp_max and warp_sum are over kWarpThreads threads side by side, and all of them get it.
/// - shared is the block's shared memory. send stores a part at the same place of a block of the
///   cluster, of one of kNumExchanges; await_parts returns to all threads of a block when it has
///   been sent so many of an exchange, and is called for each exchange in its turn, as await_load.
/// - load and store begin a copy, and are called by thread 0 alone. A load ends before await_load
///   of its slot and turn returns, which all threads call for every load in its turn (0, 1, 0, 1
///   and so on, for each slot). seal comes between what threads have written to shared memory and
///   a store of it; await_stores returns when all but the newest num_left stores have read what
///   they copy, and drain_stores when all have ended.
template <class B>
concept RowBlock =
    requires(B block, std::byte* bytes, float value, double wide, unsigned number, LossPart& part) {
      { B::kWarpThreads } -> std::convertible_to<unsigned>;
      { B::kVectorsPerThread } -> std::convertible_to<unsigned>;
      { block.thread_idx() } -> std::same_as<unsigned>;
      { block.num_threads() } -> std::same_as<unsigned>;
      { block.cluster_rank() } -> std::same_as<unsigned>;
      { block.cluster_blocks() } -> std::same_as<unsigned>;
      { block.cluster_idx() } -> std::same_as<unsigned>;
      { block.num_clusters() } -> std::same_as<unsigned>;
      { block.shared() } -> std::same_as<std::byte*>;
      block.start();
      block.sync();
      { block.warp_max(value) } -> std::same_as<float>;
      { block.warp_sum(value) } -> std::same_as<float>;
      { block.warp_sum(wide) } -> std::same_as<double>;
      block.send(number, number, part, part);
      block.await_parts(number, number, number);
      block.load(number, bytes, static_cast<const std::byte*>(bytes), number);
      block.await_load(number, number);
      block.seal();
      block.store(bytes, static_cast<const std::byte*>(bytes), number);
      block.template await_stores<1>();
      block.drain_stores();
    };

}  // namespace ringcomm::cuda
