#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "collectives/cuda/call_board.h"
#include "collectives/failure.h"
#include "collectives/watch_thread.h"
#include "device/cuda/call.h"
#include "device/cuda/control.h"
#include "transport/membership.h"

namespace ringcomm::cuda {

/// Looks after the kernels of a group while the host does other things: what they report, which
/// peers they wait for in vain, whether all ranks have launched the same. Ends the group where it
/// must, and the kernels' waits with it. A thread, asleep until the first launch.
class DeviceWatch {
 public:
  struct Subject {
    Control& control;
    CallBoard& calls;
    Membership& members;
    Failure& failure;
    int rank;
    int world_size;
    /// A dead rank whose turn this rank's streams wait for, or -1.
    std::function<int()> find_dead_turn;
    std::chrono::milliseconds timeout;
  };

  /// `report` is told the error that ends the group, once.
  DeviceWatch(const Subject& subject, std::function<void(const std::string&)> report);
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// A kernel has been launched. It may start at any time, behind whatever its stream has yet to
  /// do, and one of a graph again and again: the watch never sleeps from then on.
  void note_launch();

  /// Ends all waits of kernels, now.
  void end_waits();

  /// What call `number` was, for an error.
  Activity activity_of(std::uint64_t number) const;

 private:
  bool goes_on();
  void look();
  void look_at_record();
  void look_at_wait();
  void look_at_turns();
  [[noreturn]] void raise_stopped(Stop stop, int peer);
  void compare_calls();

  Subject subject_;
  std::function<void(const std::string&)> report_;
  std::uint64_t num_compared_ = 0;
  std::uint32_t asked_at_ = 0;

  WatchThread thread_;  // last: it uses all of the above
};

}  // namespace ringcomm::cuda
