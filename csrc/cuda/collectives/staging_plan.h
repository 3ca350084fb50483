#pragma once

#include <limits>

#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// Facts about a group's devices from which its staging is planned.
struct DeviceFacts {
  int world_size = 1;
  int max_ranks_per_device = 1;  ///< of this group
  bool is_on_one_device = false;
  int min_multiprocessors = 1;  ///< of any of the devices
  /// Places for blocks that wait (BlockReservation) that are free on every device.
  int free_blocks = std::numeric_limits<int>::max();
  /// No kernel waits: larger pieces, as no cache keeps them from one turn to the next.
  bool takes_turns = false;
};

/// The blocks of all groups that may wait on a device at a time: an eighth of the multiprocessors
/// stays free. All blocks of all groups fit the device, as a group has at most twice those that it
/// reserves.
int max_waiting_blocks(int num_multiprocessors);
/// Whether a rank reserves its blocks. If all ranks are on one device, rank 0 does not: blocks wait
/// only until the last rank's kernel runs.
bool reserves_blocks(const DeviceFacts& facts, int rank);
/// The blocks of one rank's collectives. 0 if too few are free.
unsigned blocks_that_fit(const DeviceFacts& facts);
/// With blocks_that_fit() or, if ranks take turns, as many blocks as fit the device. Unless they
/// take turns, all but the message slots is at most 24 MiB for all ranks on one device; with them a
/// rank has its share of 24 MiB, or more if messages need more.
StagingLayout make_staging_layout(const DeviceFacts& facts);

/// The blocks for messages to another rank, and as many for messages from it, out of `free_blocks`;
/// 0 if there are too few.
unsigned blocks_per_lane_that_fit(const StagingLayout& layout, int free_blocks);

}  // namespace ringcomm::cuda
