#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "cuda/kernels/call.h"
#include "transport/transport.h"

namespace ringcomm::cuda {

using HeaderWords = std::array<std::uint32_t, kHeaderWords>;

/// A header without the call's number, which a replayed graph cannot change.
HeaderWords to_words(const CallHeader& header);
/// As kernels compare it: without sizes that other ranks need not know, and with a digest of those
/// of uneven shards.
HeaderWords compared_words(const Collective& call, int world_size);
CallHeader from_words(const std::uint32_t* words);

/// The launch of a call; the same on all ranks.
struct LaunchPlan {
  std::string kernel;
  unsigned num_blocks = 1;
  unsigned blocks_per_place = 1;  ///< 1 as long as there is a place for each
  /// The number of launches if ranks take turns (KernelCall::first_step).
  std::uint32_t num_turns = 1;
  Traffic traffic = {};
  bool can_lend = true;  ///< whether peers may use its buffers in place
};

/// Sets the algorithm; only boards can be split into turns.
void plan_algorithm(const CommunicatorOptions& options, const StagingLayout& layout,
                    bool takes_turns, Collective& call);

/// Sets all of `kernel_call` but its GroupFrame, which must be set. Throws std::invalid_argument if
/// there is no kernel.
LaunchPlan plan_launch(const Collective& call, KernelCall& kernel_call);

/// The longest shard of a move that this rank knows.
std::uint64_t longest_shard(const KernelCall& call);
/// Sets the slices of a move; where ranks take turns, from the longest shard of all.
void set_longest_shard(KernelCall& call, LaunchPlan& plan, std::uint64_t longest_bytes);

/// The place at which peers have mapped a buffer of this rank (Lent::place); 0 if they have not.
using PlaceOf = std::function<std::uint64_t(const std::byte* data, std::size_t num_bytes)>;

/// Tells the kernel of a planned call which of this rank's buffers its peers can access: input and
/// output of an all_reduce and a fused update, the data for other ranks of every other call. A rank
/// lends all of these or none: none that its own kernel writes while peers would read it, and none
/// in calls so short that staging needs one round and lending two; returns false for these.
bool find_lent_buffers(const Collective& call, const LaunchPlan& plan, const PlaceOf& place_of,
                       KernelCall& kernel_call);

/// An optimizer step on this rank's arrays, without communication. Sets all of `kernel_call`.
LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call);

/// Throws std::invalid_argument where a batch of messages is too large for a kernel.
void check_batch(const std::vector<P2pMessage>& messages);
/// Plans a batch of messages that has passed check_batch(). Sets messages and lanes.
LaunchPlan plan_exchange(std::vector<P2pMessage> messages, unsigned places_per_lane, P2pCall& call);

}  // namespace ringcomm::cuda
