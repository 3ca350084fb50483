#pragma once

#include <string>
#include <vector>

#include "cuda/driver/driver_api.h"
#include "host/fd.h"

namespace ringcomm::cuda {

/// Reserves places on a GPU for thread blocks that wait for other ranks, out of a fixed number for
/// all groups of all processes of this user: blocks that wait for one that cannot start would
/// deadlock.
///
/// A place is a locked byte of a file in /dev/shm. The system releases the locks of a process
/// however it ends. The last process removes the file. If the file is removed while groups use it,
/// this process makes no more groups on that GPU until those are destroyed. Where the system has no
/// such locks, as in some sandboxes, each object counts for itself alone. All functions throw
/// Error.
class BlockReservation {
 public:
  /// Of none at first. `capacity`: the places of the GPU.
  BlockReservation(const DeviceUuid& device, int capacity);
  /// Releases all places.
  ~BlockReservation();

  /// Whether others' places are known.
  bool is_shared() const { return static_cast<bool>(file_); }
  int capacity() const { return static_cast<int>(is_reserved_.size()); }
  /// Places that are free at this moment.
  int num_free() const;
  /// Reserves `num_places` more places, or none and returns false if fewer are free.
  bool reserve(int num_places);
  void release_all();

 private:
  static void close_in_children();
  void open_file();
  bool has_locks() const;
  void check_same_file();
  bool is_current() const;
  bool lock(int byte, short type);

  std::string path_;
  host::UniqueFd file_;
  std::vector<bool> is_reserved_;  // by place
};

}  // namespace ringcomm::cuda
