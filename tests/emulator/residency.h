#pragma once

#include <atomic>
#include <deque>
#include <mutex>

#include "emulator/device.h"

// The blocks that are resident on a GPU. Processes of a machine share it by locks on bytes of this
// library's file, which the system releases when a process ends.

namespace ringcomm::emulator {

/// A GPU for which the kernels of all streams of all processes of the machine compete. It adds no
/// memory order, so that ThreadSanitizer detects races between kernels that no event orders.
class Residency {
 public:
  static Residency& of(DeviceOrdinal device);

  /// Without MPS, reserves the GPU for the kernels of this process, which share it.
  void begin_kernel();
  void end_kernel();

  /// Waits until a multiprocessor has `num_slots` adjacent free slots for a block; uses all
  /// multiprocessors before it puts a second block on one. Returns the first slot.
  int acquire(int num_slots);
  void release(int slot, int num_slots);

 private:
  explicit Residency(int physical_device);
  bool try_acquire(int slot, int num_slots);

  const int device_;
  std::deque<std::atomic<bool>> is_taken_;  // by blocks of this process
  std::mutex mutex_;
  int num_kernels_ = 0;  // of this process, that run
};

}  // namespace ringcomm::emulator
