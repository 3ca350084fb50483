#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

namespace ringcomm {

/// Replaces infinite timeouts: long enough not to matter, short enough to add to a clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// How long an operation may wait, and when it is interrupted.
struct WaitLimits {
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  /// Called by the waiting thread about every 50 ms; true ends the operation. May be empty.
  std::function<bool()> is_interrupted;
};

/// Called about every 50 ms while the message transport connects, with a rank that has not arrived
/// yet. Throws Error if that rank cannot arrive any more. The caller then checks a last time
/// whether all ranks have arrived, because one may have arrived and ended since.
using LookForRanks = std::function<void(int missing)>;

/// `timeout` from now; the end of time where the clock does not count that far.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using TimePoint = std::chrono::steady_clock::time_point;
  const TimePoint now = std::chrono::steady_clock::now();
  // Compared in milliseconds: the clock's nanoseconds would overflow first.
  const auto countable = std::chrono::floor<std::chrono::milliseconds>(TimePoint::max() - now);
  return timeout < countable ? now + timeout : TimePoint::max();
}

/// Sleeps between two looks at something that other processes change: longer each time, up to
/// 50 ms.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min<std::chrono::microseconds>(2 * pause_, std::chrono::milliseconds(50));
  }
  void reset() { *this = {}; }

 private:
  std::chrono::microseconds pause_{200};
};

}  // namespace ringcomm
