#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/communicator_options.h"
#include "device/cuda/call.h"

namespace ringcomm::cuda {

/// What a call becomes: a kernel, its grid, its parameter. The same on all ranks but for pointers.
struct LaunchPlan {
  std::string kernel;
  unsigned num_blocks = 1;
  /// How many launches it takes where ranks take turns (KernelCall::first_step).
  std::uint32_t num_turns = 1;
  Traffic traffic;
};

/// What is known of a group's devices where its staging is cut.
struct DeviceFacts {
  int world_size = 1;
  int max_ranks_per_device = 1;  ///< of this group
  int ranks_on_device = 1;       ///< of all groups so far
  bool is_first = true;          ///< the first of the groups that these ranks have on their devices
  int min_multiprocessors = 1;   ///< of any of the devices
  int blocks_per_multiprocessor = 1;
  /// Ranks take turns on the device, and nothing waits in a kernel: larger pieces, as no cache
  /// keeps them from one turn to the next.
  bool takes_turns = false;
};

/// How staging is cut: with so many blocks that two calls of all ranks fit all devices at once,
/// since a block that waits for one that cannot start would wait for ever; and no more than 24 MiB
/// for all ranks on one device unless they take turns.
StagingLayout make_staging_layout(const DeviceFacts& facts);

/// Blocks of one rank's kernels that fit its device beside as many of the others there.
unsigned blocks_per_rank(const DeviceFacts& facts);

/// Fills in algorithm and ring geometry. Only boards can be cut into turns.
void plan_header(const Collective& call, const CommunicatorOptions& options,
                 const StagingLayout& layout, bool takes_turns, CallHeader& header);

/// Fills in all of `kernel_call` but its staging, control, timeout and rank, which it has.
/// Throws std::invalid_argument where the call cannot be made.
LaunchPlan plan_launch(const Collective& call, const CallHeader& header, KernelCall& kernel_call);

/// A step of an optimizer on this rank's arrays, which are `num_elems` of its own and not all of
/// the call's: what the call does in a group of one. Fills in all of `kernel_call`.
LaunchPlan plan_own_update(const Collective& call, const void* grad, void* param,
                           std::size_t num_elems, KernelCall& kernel_call);

/// Of calls whose sizes no rank knew alone, when they are known.
std::uint32_t turns_of_move(const StagingLayout& layout, std::uint64_t longest_bytes,
                            unsigned num_blocks, bool is_shared);

/// Throws std::invalid_argument where a batch of messages is too large for a kernel, or for a
/// device that `most_blocks` fit at once.
void check_batch(const std::vector<Mail>& messages, unsigned most_blocks);
/// Of a batch of one message or more, which has passed that. Fills in messages and lanes.
LaunchPlan plan_exchange(std::vector<Mail> messages, MailCall& call);

}  // namespace ringcomm::cuda
