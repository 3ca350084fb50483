#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/collectives/group_words.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/driver/device_memory.h"
#include "host/bootstrap.h"
#include "host/shared_memory.h"

namespace ringcomm::cuda {

/// The blocks of this process on a device that may wait for other ranks at a time, for all of its
/// groups. Blocks that wait for one that cannot start would deadlock, so each process keeps to its
/// share of the device. From any thread; kept as long as the process.
class WaitingBlocks : public PerDevice<WaitingBlocks> {
 public:
  /// What is left for a group, as it says how many blocks a process has. Less than zero where later
  /// groups had one block each.
  int left(int share) {
    const std::lock_guard lock(mutex_);
    share_ = std::min(share_, share);
    return share_ - num_taken_;
  }
  /// Takes those of a group, which has them as long as the result.
  std::shared_ptr<void> take(int num_blocks) {
    num_taken_ += num_blocks;
    return {this, [num_blocks](WaitingBlocks* all) { all->num_taken_ -= num_blocks; }};
  }

 private:
  friend PerDevice;
  explicit WaitingBlocks(DeviceOrdinal) {}

  std::mutex mutex_;
  int share_ = 1 << 20;  // the least of any group; guarded by mutex_
  std::atomic<int> num_taken_ = 0;
};

/// The devices of a group's ranks, and the memory through which their kernels communicate: every
/// rank's staging, mapped by all, and a piece of host memory.
class DeviceGroup {
 public:
  /// Collective; `exchange` outlives it. Throws Unavailable, with the same reason on all ranks, if
  /// device memory cannot be shared; Error if a rank does not arrive.
  DeviceGroup(RecordExchange& exchange, DeviceOrdinal device);
  DeviceOrdinal device() const { return device_; }
  const RankPlace& place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  const Staging& staging() const { return staging_; }
  Control& control() const { return *static_cast<Control*>(control_->host()); }
  Control* control_on_device() const { return static_cast<Control*>(control_->device()); }
  const DeviceFacts& facts() const { return facts_; }
  /// Whether ranks map each other's ordinary tensors: all do, or none (RINGCOMM_MAP_TENSORS).
  bool maps_tensors() const { return maps_tensors_; }
  GroupWords& words() const { return *reinterpret_cast<GroupWords*>(host_memory_.data()); }
  const std::string& description() const { return description_; }

 private:
  void find_places();
  void read_facts();
  void share_host_memory();
  void share_staging();
  void probe(int peer);

  RecordExchange& exchange_;
  DeviceOrdinal device_;
  DeviceFacts facts_;
  bool maps_tensors_ = true;
  std::vector<RankPlace> places_;
  std::shared_ptr<void> waiting_blocks_;
  std::unique_ptr<MappedHostMemory> control_;
  host::SharedMemory host_memory_;
  Staging staging_;
  std::vector<std::unique_ptr<DeviceMemory>> parts_;  // of the staging, by rank
  std::string description_;
};

}  // namespace ringcomm::cuda
