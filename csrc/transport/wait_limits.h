#pragma once

#include <chrono>
#include <functional>

namespace ringcomm {

/// In place of time-outs without end: far enough not to matter, near enough to be added to a clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// How long, and under whose eyes, an operation may wait.
struct WaitLimits {
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  /// Asked by the waiting thread about every 50 ms; true ends the operation. May be empty.
  std::function<bool()> is_interrupted;
};

/// Called every 50 ms or so while messages are made, by what waits for ranks, with one that has
/// not come yet: throws Error when it is waited for in vain. The waiting rank then looks a last
/// time whether all have come: one that came may have ended since.
using LookForRanks = std::function<void(int missing)>;

/// `timeout` from now; the end of time where the clock does not count that far.
std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout);

}  // namespace ringcomm
