#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace ringcomm {

/// Replaces infinite timeouts: long enough not to matter, short enough to add to a clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// How late a wait may notice a timeout, a death or an interruption. A check for signals takes
/// Python's GIL: it is rare, and never in waits that end immediately.
inline constexpr std::chrono::milliseconds kLookInterval{50};

/// How long an operation may wait, and when it is interrupted.
struct WaitLimits {
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  /// Called by the waiting thread about every kLookInterval; true ends the operation. May be empty.
  std::function<bool()> is_interrupted;
};

/// Called about every kLookInterval while the messenger connects, with the ranks that have
/// not arrived yet. Throws Error if one cannot arrive any more; the caller then checks a last time
/// whether all have arrived, because one may have arrived and ended since.
using LookForRanks = std::function<void(const std::vector<int>& missing)>;

/// The clock of deadlines. Each wait reads it about every kLookInterval; where nobody has for
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

/// Sleeps between two looks at something that other processes change: longer each time, up to
/// kLookInterval.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min<std::chrono::microseconds>(2 * pause_, kLookInterval);
  }
  void reset() { *this = {}; }

 private:
  std::chrono::microseconds pause_{200};
};

}  // namespace ringcomm
