#pragma once

#include <string>
#include <vector>

#include "transport/cuda/driver_api.h"
#include "transport/shm/unique_fd.h"

namespace ringcomm::cuda {

/// The room that a GPU has for blocks that wait for other ranks, in seats: one for each block, of
/// all groups of all processes of this user. Blocks that wait for one that cannot start would wait
/// for ever, so nobody launches more of them than it has seats for.
///
/// A seat is a byte of a file in /dev/shm; who has locked it has taken it. The system unlocks what
/// a process had, however that ends. The last to leave removes the file; where that was killed, an
/// empty file stays, and is used again.
///
/// All functions throw Error.
class DeviceRoom {
 public:
  DeviceRoom(const DeviceUuid& device, int num_seats);
  /// Gives all seats back.
  ~DeviceRoom();
  DeviceRoom(const DeviceRoom&) = delete;
  DeviceRoom& operator=(const DeviceRoom&) = delete;

  int num_seats() const { return num_seats_; }
  /// That nobody has, at this moment.
  int num_free() const;
  /// Takes so many more, or none: false where there are not as many.
  bool take(int num_wanted);
  void give_all_back();

 private:
  void open_file();
  bool is_current() const;
  bool lock(int byte, short type);
  bool take_at_desk(int num_wanted);

  std::string path_;
  int num_seats_;
  shm::UniqueFd file_;
  std::vector<bool> has_taken_;  // by seat
};

}  // namespace ringcomm::cuda
