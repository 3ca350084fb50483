#pragma once

#include <cstdint>
#include <limits>
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
  bool is_on_one_device = false;
  int min_multiprocessors = 1;  ///< of any of the devices
  int blocks_per_multiprocessor = 1;
  /// Of the seats for blocks that wait (DeviceRoom): those that no group has, on any of the
  /// devices.
  int free_seats = std::numeric_limits<int>::max();
  /// Ranks take turns on the device, and nothing waits in a kernel: larger pieces, as no cache
  /// keeps them from one turn to the next.
  bool takes_turns = false;
};

/// Seats of a device for blocks that wait, of all groups: so few that an eighth of the
/// multiprocessors has none of them, if each block is on one of its own, and that all blocks of all
/// ranks of all groups fit the device, if each group on one device takes seats as takes_seats()
/// says.
int num_seats(int num_multiprocessors, int blocks_per_multiprocessor);
/// Whether a rank takes seats. Of the ranks of a group on one device rank 0 does not: a call that
/// all of them are in ends, so those of one are always free to go on.
bool takes_seats(const DeviceFacts& facts, int rank);
/// Blocks of one rank's collectives, for which each rank that takes seats takes as many; 0 where
/// the seats that are free are too few.
unsigned blocks_that_fit(const DeviceFacts& facts);
/// How staging is cut: with blocks_that_fit(), or, where ranks take turns, with as many as fit the
/// device. No more than 24 MiB for all ranks on one device unless they take turns.
StagingLayout make_staging_layout(const DeviceFacts& facts);

/// Clusters of blocks that each have a multiprocessor of their own, of a kernel of rows in which
/// ranks wait for each other (RowLaunch).
struct RowPlan {
  int num_clusters = 0;    ///< of each rank; 0: there is no room
  int num_more_seats = 0;  ///< for each rank that takes seats, beside those of its blocks
};
/// `max_active` is how many such clusters a GPU runs at a time, the least of any; `free_seats` are
/// those that no group has on any; `num_taken` were taken for rows before. So many seats that, with
/// all but one rank waiting, and all other seats taken, a cluster of the last one finds room:
/// docs/design/cross_entropy.md has the argument.
RowPlan plan_rows(const DeviceFacts& facts, const StagingLayout& layout, int cluster_blocks,
                  int max_active, int free_seats, int num_taken);

/// Blocks for what goes to another rank, and as many for what comes from it, of `free_seats`: 0
/// where there are too few.
unsigned blocks_per_lane_that_fit(const StagingLayout& layout, int free_seats);

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

/// Throws std::invalid_argument where a batch of messages is too large for a kernel.
void check_batch(const std::vector<Mail>& messages);
/// Of a batch of one message or more, which has passed that; with `blocks_per_lane` at most. Fills
/// in messages and lanes.
LaunchPlan plan_exchange(std::vector<Mail> messages, unsigned blocks_per_lane, MailCall& call);

}  // namespace ringcomm::cuda
