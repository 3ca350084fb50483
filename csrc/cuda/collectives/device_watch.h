#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "communicator/communicator.h"
#include "cuda/collectives/group_words.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/kernels/staging.h"
#include "host/threads.h"

namespace ringcomm::cuda {

/// The watchdog of a group's kernels. It reads their reports, detects peers that cannot arrive, and
/// compares the launches of all ranks: kernels of calls that differ much never exchange headers. On
/// a failure it ends the group and the kernels' waits. It is a thread that sleeps until the first
/// launch.
class DeviceWatch {
 public:
  /// `report` is called once, with the error that ends the group, and `look_at_memory` again and
  /// again until then. The others outlive the watchdog.
  DeviceWatch(Communicator& communicator, Control& control, GroupWords& words,
              std::chrono::milliseconds timeout, std::function<void(const std::string&)> report,
              std::function<void()> look_at_memory);

  /// Records the launch of call `number`, counted from 0, where the other ranks read it. There is
  /// one writer per rank; entries are overwritten, and a late reader skips the comparison.
  void record_call(std::uint64_t number, const HeaderWords& header);
  /// After a kernel launch. The kernel may start at any time, so the watchdog sleeps no more.
  void record_launch() { thread_.stay_awake(); }

  /// Ends all waits of kernels, now.
  void end_waits() { __atomic_store_n(&control_.abort, 1u, __ATOMIC_RELEASE); }

  /// Of the calls to come, for errors.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  bool goes_on();
  void look_at_record();
  void look_at_wait();
  void compare_calls();
  std::uint64_t num_recorded(int rank) const { return words_.ranks[rank].num_launches; }
  bool read(int rank, std::uint64_t number, HeaderWords& header) const;
  Activity activity_of(std::uint64_t number) const;

  Communicator& communicator_;
  Control& control_;
  GroupWords& words_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::function<void(const std::string&)> report_;
  std::function<void()> look_at_memory_;
  std::uint64_t num_compared_ = 0;
  std::uint32_t asked_at_ = 0;
  int num_waits_for_gone_ = 0;

  WatchThread thread_;  // last: it uses all of the above
};

}  // namespace ringcomm::cuda
