#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

using HeaderWords = std::array<std::uint32_t, kHeaderWords>;

/// A header as kernels compare it, without the call's number, which a replayed graph cannot change.
HeaderWords to_words(const CallHeader& header);
CallHeader from_words(const std::uint32_t* words);

/// The launch of a call: kernel, grid and parameter. The same on all ranks except for pointers.
struct LaunchPlan {
  std::string kernel;
  unsigned num_blocks = 1;
  /// The number of launches if ranks take turns (KernelCall::first_step).
  std::uint32_t num_turns = 1;
  Traffic traffic;
};

/// Sets the algorithm. Only boards can be split into turns.
void plan_header(const Collective& call, const CommunicatorOptions& options,
                 const StagingLayout& layout, bool takes_turns, CallHeader& header);

/// Sets all of `kernel_call` except its staging, control, timeout and rank, which must be set.
/// Throws std::invalid_argument if the call is not possible.
LaunchPlan plan_launch(const Collective& call, const CallHeader& header, KernelCall& kernel_call);

/// The longest share of a move that this rank knows.
std::uint64_t longest_share(const KernelCall& call);
/// Sets the number of slices of a move and their distribution. Where ranks take turns, the hosts
/// have exchanged the longest share of all.
void set_longest_share(KernelCall& call, LaunchPlan& plan, std::uint64_t longest_bytes);

/// The place at which peers have mapped a buffer of this rank (Lent::place); 0 if they have not.
using PlaceOf = std::function<std::uint64_t(const std::byte* data, std::size_t num_bytes)>;

/// Tells the kernel of a planned call which of this rank's buffers its peers can access directly:
/// the input and the output of an all_reduce and a fused update, and the data for other ranks of
/// every other call. A rank lends all of these or none. It lends no buffer that its own kernel
/// writes while peers would read it, and none in calls so short that staging needs one
/// synchronization and lending two.
void find_lent_buffers(const Collective& call, const LaunchPlan& plan, const PlaceOf& place_of,
                       KernelCall& kernel_call);

/// An optimizer step on this rank's arrays of `num_elems` elements, without communication: what the
/// call does in a group of one. Sets all of `kernel_call`.
LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call);

/// Throws std::invalid_argument where a batch of messages is too large for a kernel.
void check_batch(const std::vector<P2pMessage>& messages);
/// Plans a batch of at least one message that has passed check_batch(), with at most
/// `blocks_per_lane` blocks. Sets messages and lanes.
LaunchPlan plan_exchange(std::vector<P2pMessage> messages, unsigned blocks_per_lane, P2pCall& call);

}  // namespace ringcomm::cuda
