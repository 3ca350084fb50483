#pragma once

#include <cstdint>
#include <limits>

#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// Facts about a group's devices from which its staging is planned.
struct DeviceFacts {
  int world_size = 1;
  int max_ranks_per_device = 1;  ///< of this group
  int min_multiprocessors = 1;   ///< of any of the devices
  /// Blocks that may wait for other ranks (WaitingBlocks) that each rank has left.
  int free_blocks = std::numeric_limits<int>::max();
  std::uint64_t free_bytes = std::numeric_limits<std::uint64_t>::max();  ///< of the fullest device
};

/// The blocks of one rank's process on a device that may wait for other ranks at a time: its share
/// of seven eighths as many as there are multiprocessors, each of which has room for two.
int share_of_waiting_blocks(int num_multiprocessors, int num_ranks);
/// Those of a new group: three quarters of what its ranks have left, at least one.
int waiting_blocks_of_group(const DeviceFacts& facts);
/// Whether kernels that wait for messages of all peers at a time find room on the device.
bool has_room_for_messages(const DeviceFacts& facts);

/// About 16 MiB for each rank, and scratch memory of at most 64 MiB.
StagingLayout make_staging_layout(const DeviceFacts& facts);

}  // namespace ringcomm::cuda
