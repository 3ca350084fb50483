#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "core/arch.h"

namespace ringcomm {

/// Replaces infinite timeouts: long enough not to matter, short enough to add to a clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// How late a wait may notice an interruption: a check for signals takes Python's GIL, so it is
/// rare, and never in waits that end immediately. Waits for a cursor look at timeouts and deaths
/// each time that they sleep (host_arch.cc), other waits as rarely.
inline constexpr std::chrono::milliseconds kCheckInterval{50};

/// How long an operation may wait, and when it is interrupted.
struct WaitLimits {
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  /// Called by the waiting thread about every kCheckInterval; true ends the operation. May be
  /// empty.
  std::function<bool()> is_interrupted;
};

/// The clock of deadlines. Each wait reads it about every kCheckInterval; where nobody has for
/// longer than kLongestStop, the process did not run (SIGSTOP, a frozen container), and no more of
/// that counts: a job that was stopped as a whole is not late.
struct RunningClock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<RunningClock>;
  static constexpr bool is_steady = true;
  static constexpr std::chrono::seconds kLongestStop{1};

  static time_point now();
};

/// `timeout` from now; the end of time where the clock does not count that far.
inline RunningClock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using TimePoint = RunningClock::time_point;
  const TimePoint now = RunningClock::now();
  // Compared in milliseconds: the clock's nanoseconds would overflow first.
  const auto countable = std::chrono::floor<std::chrono::milliseconds>(TimePoint::max() - now);
  return timeout < countable ? now + timeout : TimePoint::max();
}

/// What ends a wait before its condition holds: its deadline, a signal, and what derived guards add
/// (host::GroupWait: the words of a group). Of one waiting thread.
class WaitGuard {
 public:
  using Clock = RunningClock;
  using IsInterrupted = std::function<bool()>;

  explicit WaitGuard(Clock::time_point deadline = Clock::time_point::max(),
                     IsInterrupted is_interrupted = {})
      : deadline_(deadline), is_interrupted_(std::move(is_interrupted)) {}
  explicit WaitGuard(const WaitLimits& limits) { start(limits); }
  virtual ~WaitGuard() = default;

  /// Why to wait for rank `peer` no longer; kNone: go on. A waiting thread that holds no locks
  /// calls it before every slice of sleep.
  virtual WaitStatus check(int peer = -1);
  /// A wait for `peer` has become long and, where `end_ticks` is not 0, has ended.
  virtual void record(int /*peer*/, std::uint64_t /*begin_ticks*/, std::uint64_t /*end_ticks*/) {}

  bool is_late() const { return Clock::now() >= deadline_; }
  /// When a sleep has to end. The first check for signals is due kCheckInterval after the first
  /// call of this or of check(): a wait that ends before reads no clock.
  Clock::time_point next_check();
  /// Sleeps until there may be news, and calls check() without the lock if it is due.
  void sleep(std::unique_lock<std::mutex>& lock, std::condition_variable& news);

 protected:
  /// The time of another wait begins.
  void start(const WaitLimits& limits);

 private:
  Clock::time_point deadline_;
  Clock::time_point next_check_ = {};
  IsInterrupted is_interrupted_;
};

/// Sleeps between two checks of what other processes change: longer each time, up to
/// kCheckInterval.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min<std::chrono::microseconds>(2 * pause_, kCheckInterval);
  }
  void reset() { *this = {}; }

 private:
  std::chrono::microseconds pause_{200};
};

}  // namespace ringcomm
