#pragma once

#include <map>
#include <memory>
#include <vector>

#include "collectives/cuda/device_group.h"
#include "collectives/cuda/record_exchange.h"
#include "transport/cuda/device_room.h"

namespace ringcomm::cuda {

/// A group's room for kernels whose blocks fill a multiprocessor each and wait for other ranks, in
/// clusters (RowLaunch). Seats are taken when they are first needed, and kept. By one thread at a
/// time.
class RowRoom {
 public:
  RowRoom(RecordExchange& exchange, const DeviceGroup& group)
      : exchange_(exchange), group_(group) {}

  /// The same on all ranks. Collective at the first call for a number of blocks. Throws Error.
  int num_clusters(unsigned cluster_blocks, int max_active);

 private:
  int find_room(int cluster_blocks, int max_active);

  RecordExchange& exchange_;
  const DeviceGroup& group_;
  std::map<unsigned, int> known_;  // by the blocks of a cluster
  int num_taken_ = 0;              // seats of each rank that takes seats
  std::vector<std::unique_ptr<DeviceRoom>> rooms_;
};

}  // namespace ringcomm::cuda
