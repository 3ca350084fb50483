#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/loss_call.h"

namespace ringcomm::cuda {

/// The partial result of some logits of a row.
struct LossPart {
  float max;    ///< the lowest number without any above -infinity
  float sum;    ///< of exp(logit_scale * (x - max))
  float total;  ///< of x, for label smoothing
  float unused = 0;
};
static_assert(sizeof(LossPart) == kVectorBytes);

/// In front of the slots in shared memory.
struct LossHeading {
  std::uint64_t loaded[kNumRowSlots];      ///< barriers of a GPU's block
  std::uint64_t exchanged[kNumExchanges];  ///< the same
  alignas(kVectorBytes) LossPart of_blocks[kNumExchanges][kMaxClusterBlocks];
  LossPart of_warps[32];
  double counts[32];
};
static_assert(sizeof(LossHeading) <= kLossHeadingBytes);

/// The interface of a block of threads that runs loss_rows.h: a place in a cluster of blocks with
/// access to each other's shared memory, and asynchronous copies between global and shared memory.
/// gpu_row_block.cuh implements it on GPUs; tests implement it with host threads.
///
/// - kVectorsPerThread times num_threads vectors are no less than a call's segment_vectors.
/// - sync is the barrier of the block's threads. start() is a barrier of all threads of the
///   cluster. Writes before a barrier are visible after it.
/// - warp_max and warp_sum are over kWarpThreads threads side by side, and all of them get it.
/// - shared is the block's shared memory. send stores a part at the same place of a block of the
///   cluster, of one of kNumExchanges; await_parts returns to all threads of a block when every
///   block of the cluster has sent it a part; it is called for each exchange in turn, like
///   await_load.
/// - load and store start a copy, and are called by thread 0 only. A load is complete when
///   await_load of its slot and turn returns, which all threads call for every load in turn (0, 1,
///   0, 1 and so on, for each slot). seal goes between the threads' writes to shared memory and a
///   store of them. await_stores returns when all but the newest num_left stores have read their
///   source, and drain_stores when all are complete.
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
      block.await_parts(number, number);
      block.load(number, bytes, static_cast<const std::byte*>(bytes), number);
      block.await_load(number, number);
      block.seal();
      block.store(bytes, static_cast<const std::byte*>(bytes), number);
      block.template await_stores<1>();
      block.drain_stores();
    };

}  // namespace ringcomm::cuda
