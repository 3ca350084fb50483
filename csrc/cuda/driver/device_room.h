#pragma once

#include <string>
#include <vector>

#include "cuda/driver/driver_api.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// The room of a GPU for blocks that wait for other ranks, counted in seats: one for each block of
/// all groups of all processes of this user. If blocks waited for a block that cannot start, they
/// would deadlock. So a process never launches more of them than it has seats.
///
/// A seat is a byte of a file in /dev/shm, and is taken by locking it. The system releases the
/// locks of a process however it ends. The last process removes the file. If that process was
/// killed, an empty file remains and is used again. If the file is removed while groups use it,
/// this process makes no more groups on that GPU until those are destroyed.
///
/// All functions throw Error.
class DeviceRoom {
 public:
  DeviceRoom(const DeviceUuid& device, int num_seats);
  /// Releases all seats.
  ~DeviceRoom();
  DeviceRoom(const DeviceRoom&) = delete;
  DeviceRoom& operator=(const DeviceRoom&) = delete;

  int num_seats() const { return num_seats_; }
  /// Seats that are free at this moment.
  int num_free() const;
  /// Takes `num_wanted` more seats, or none and returns false if fewer are free.
  bool take(int num_wanted);
  void give_all_back();

 private:
  void open_file();
  void join();
  bool is_current() const;
  bool lock(int byte, short type);
  bool take_at_desk(int num_wanted);

  std::string path_;
  int num_seats_;
  shm::UniqueFd file_;
  std::vector<bool> has_taken_;  // by seat
};

}  // namespace ringcomm::cuda
