#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "collectives/failure.h"
#include "cuda/collectives/call_board.h"
#include "transport/watch_thread.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/control.h"
#include "transport/membership.h"

namespace ringcomm::cuda {

/// The watchdog of a group's kernels. It reads their reports, detects peers that cannot arrive, and
/// compares the launches of all ranks. On a failure it ends the group and the kernels' waits. It is
/// a thread that sleeps until the first launch.
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

  /// `report` is called once, with the error that ends the group.
  DeviceWatch(const Subject& subject, std::function<void(const std::string&)> report);
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// Call it after a kernel launch. A kernel may start at any time later, and one in a graph many
  /// times, so the watchdog never sleeps from then on.
  void note_launch();

  /// Ends all waits of kernels, now.
  void end_waits();

  /// The description of call `number`, for an error.
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
