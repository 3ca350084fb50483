#include "transport/wait_limits.h"

namespace ringcomm {

std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using TimePoint = std::chrono::steady_clock::time_point;
  const TimePoint now = std::chrono::steady_clock::now();
  // Compared in milliseconds: the clock's nanoseconds would overflow first.
  const auto countable = std::chrono::floor<std::chrono::milliseconds>(TimePoint::max() - now);
  return timeout < countable ? now + timeout : TimePoint::max();
}

}  // namespace ringcomm
