#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

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

/// An optimizer step on this rank's arrays of `num_elems` elements, without communication: what the
/// call does in a group of one. Sets all of `kernel_call`.
LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call);

/// The turns of a call with uneven shares, after the sizes have been exchanged.
std::uint32_t turns_of_move(const StagingLayout& layout, std::uint64_t longest_bytes,
                            unsigned num_blocks, bool is_shared);

/// Throws std::invalid_argument where a batch of messages is too large for a kernel.
void check_batch(const std::vector<Mail>& messages);
/// Plans a batch of at least one message that has passed check_batch(), with at most
/// `blocks_per_lane` blocks. Sets messages and lanes.
LaunchPlan plan_exchange(std::vector<Mail> messages, unsigned blocks_per_lane, MailCall& call);

}  // namespace ringcomm::cuda
