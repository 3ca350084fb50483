#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "collectives/failure.h"
#include "transport/watch_thread.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/collectives/record_exchange.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/staging.h"
#include "transport/membership.h"

namespace ringcomm::cuda {

/// The recent launches of each rank. Hosts compare them to find calls whose kernels differ so much
/// that they never exchange headers. One writer per rank; entries are overwritten, and a late
/// reader skips the comparison.
class CallBoard {
 public:
  CallBoard(GroupWords& words, int rank) : words_(words), rank_(rank) {}

  /// Records call `number`, counted from 0.
  void note(std::uint64_t number, const HeaderWords& header);
  /// How many a rank has noted.
  std::uint64_t num_noted(int rank) const { return words_.ranks[rank].num_launches; }
  /// False where it is no longer, or not yet, there.
  bool read(int rank, std::uint64_t number, HeaderWords& header) const;

 private:
  GroupWords& words_;
  int rank_;
};

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
    std::chrono::milliseconds timeout;
  };

  /// `report` is called once, with the error that ends the group.
  DeviceWatch(const Subject& subject, std::function<void(const std::string&)> report);

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
  void compare_calls();

  Subject subject_;
  std::function<void(const std::string&)> report_;
  std::uint64_t num_compared_ = 0;
  std::uint32_t asked_at_ = 0;

  WatchThread thread_;  // last: it uses all of the above
};

}  // namespace ringcomm::cuda
