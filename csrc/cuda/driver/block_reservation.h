#pragma once

#include <string>
#include <vector>

#include "cuda/driver/driver_api.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// Reserves places on a GPU for thread blocks that wait for other ranks, out of a fixed number for
/// all groups of all processes of this user. If blocks waited for a block that cannot start, they
/// would deadlock. So a process never launches more of them than it has reserved.
///
/// A place is a byte of a file in /dev/shm, and is reserved by locking it. The system releases the
/// locks of a process however it ends. The last process removes the file. If that process was
/// killed, an empty file remains and is used again. If the file is removed while groups use it,
/// this process makes no more groups on that GPU until those are destroyed.
///
/// All functions throw Error.
class BlockReservation {
 public:
  /// Of none at first. `capacity`: the places of the GPU.
  BlockReservation(const DeviceUuid& device, int capacity);
  /// Releases all places.
  ~BlockReservation();

  int capacity() const { return static_cast<int>(is_reserved_.size()); }
  /// Places that are free at this moment.
  int num_free() const;
  /// Reserves `num_blocks` more places, or none and returns false if fewer are free.
  bool reserve(int num_blocks);
  void release_all();

 private:
  void open_file();
  void check_same_file();
  bool is_current() const;
  bool lock(int byte, short type);

  std::string path_;
  shm::UniqueFd file_;
  std::vector<bool> is_reserved_;  // by place
};

}  // namespace ringcomm::cuda
