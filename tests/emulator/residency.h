#pragma once

#include <atomic>
#include <deque>

#include "emulator/device.h"

// What is on a GPU at a time. Processes of a box agree on it by locks on bytes of this library's
// file, which the system takes from a process that ends.

namespace ringcomm::emulator {

/// Holds a GPU for the kernels of this process while it lives, where there is no MPS; kernels of
/// one process share it.
class KernelTurn {
 public:
  explicit KernelTurn(int physical_device);
  ~KernelTurn();
  KernelTurn(const KernelTurn&) = delete;
  KernelTurn& operator=(const KernelTurn&) = delete;

 private:
  const int device_;
};

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
