#pragma once

#include <atomic>
#include <deque>

#include "emulator/device.h"

namespace ringcomm::emulator {

/// Where the blocks of a GPU are: kernels of all streams of all processes of the box compete for
/// them. It orders nothing, so that ThreadSanitizer sees kernels race that no event keeps apart.
class BlockSlots {
 public:
  static BlockSlots& of(DeviceOrdinal device);

  /// Waits until a multiprocessor has `num_slots` next to each other, of which a block takes so
  /// many; goes through all multiprocessors before it puts a second block on one. Returns the
  /// first.
  int acquire(int num_slots);
  void release(int slot, int num_slots);

 private:
  explicit BlockSlots(int physical_device);
  bool try_acquire(int slot, int num_slots);

  int device_;
  std::deque<std::atomic<bool>> is_taken_;  // by blocks of this process
};

}  // namespace ringcomm::emulator
