#pragma once

#include <chrono>
#include <functional>

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
std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout);

}  // namespace ringcomm
