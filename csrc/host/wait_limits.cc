#include "host/wait_limits.h"

#include <atomic>
#include <mutex>

#include "host/process.h"

namespace ringcomm {
namespace {

// How often a reader tells that the process runs.
constexpr std::chrono::milliseconds kSeenInterval{10};

struct Running {
  using Clock = std::chrono::steady_clock;
  std::mutex mutex;
  std::atomic<Clock::duration> stopped = Clock::duration::zero();
  std::atomic<Clock::time_point> seen = Clock::now();  // written after `stopped`
};
constinit PerProcess<Running> running;

}  // namespace

RunningClock::time_point RunningClock::now() {
  Running& process = running.get();
  const auto now = Running::Clock::now();
  if (now - process.seen.load(std::memory_order_acquire) > kSeenInterval) {
    const std::lock_guard lock(process.mutex);
    const auto unseen = now - process.seen.load();
    if (unseen > kLongestStop)
      process.stopped.store(process.stopped.load() + unseen - kLongestStop);
    if (unseen > duration::zero()) process.seen.store(now, std::memory_order_release);
  }
  return time_point(now.time_since_epoch() - process.stopped.load(std::memory_order_relaxed));
}

}  // namespace ringcomm
