#pragma once

#include <algorithm>
#include <mutex>

#include "cuda/driver/driver.h"

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
  /// Those of a group.
  class Taken {
   public:
    Taken(WaitingBlocks& all, int num_blocks) : all_(all), num_blocks_(num_blocks) {
      all_.add(num_blocks_);
    }
    ~Taken() { all_.add(-num_blocks_); }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;

   private:
    WaitingBlocks& all_;
    int num_blocks_;
  };

 private:
  void add(int num_blocks) {
    const std::lock_guard lock(mutex_);
    num_taken_ += num_blocks;
  }

  friend PerDevice;
  explicit WaitingBlocks(DeviceOrdinal) {}

  std::mutex mutex_;
  int share_ = 1 << 20;  // the least of any group
  int num_taken_ = 0;
};

}  // namespace ringcomm::cuda
