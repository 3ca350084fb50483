#pragma once

#include <limits>

#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// Facts about a group's devices from which its staging is planned.
struct DeviceFacts {
  int world_size = 1;
  int max_ranks_per_device = 1;  ///< of this group
  int min_multiprocessors = 1;   ///< of any of the devices
  /// Places for blocks that wait (BlockReservation) that are free on every device.
  int free_places = std::numeric_limits<int>::max();
  /// No kernel waits: larger pieces, as no cache keeps them from one turn to the next.
  bool takes_turns = false;
};

/// The places of all groups whose blocks may wait on a device at a time: an eighth of the
/// multiprocessors stays free. All blocks of all groups fit the device, as a group has at most
/// twice the places that it reserves.
int max_waiting_places(int num_multiprocessors);
/// Whether a rank reserves its places. If all ranks are on one device, rank 0 does not: blocks wait
/// only until the last rank's kernel runs.
bool reserves_places(const DeviceFacts& facts, int rank);
/// The places of one rank's collectives. 0 if too few are free.
unsigned places_that_fit(const DeviceFacts& facts);
/// With places_that_fit() or, if ranks take turns, as many places as fit the device. Unless they
/// take turns, all but the message slots is about 27 MiB for all ranks on one device; with them a
/// rank has its share of 27 MiB, or more if messages need more.
StagingLayout make_staging_layout(const DeviceFacts& facts);

/// The places for messages to another rank, and as many for messages from it, out of `free_places`;
/// 0 if there are too few.
unsigned places_per_lane_that_fit(const StagingLayout& layout, int free_places);

}  // namespace ringcomm::cuda
