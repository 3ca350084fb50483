#include "host/wait.h"

#include <atomic>
#include <tuple>

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
  for (;;) {
    const auto stopped = process.stopped.load(std::memory_order_acquire);
    const auto now = Running::Clock::now();
    if (now - process.seen.load(std::memory_order_acquire) > kSeenInterval) {
      const std::lock_guard lock(process.mutex);
      const auto unseen = now - process.seen.load();
      if (unseen > kLongestStop)
        process.stopped.store(process.stopped.load() + unseen - kLongestStop);
      if (unseen > duration::zero()) {
        process.seen.store(now, std::memory_order_release);
        return time_point(now.time_since_epoch() - process.stopped.load());
      }
    }
    // A stop that was noticed meanwhile may be later than `now`.
    if (process.stopped.load() == stopped) return time_point(now.time_since_epoch() - stopped);
  }
}

WaitStatus WaitGuard::check(int) {
  const Clock::time_point now = Clock::now();
  if (now >= deadline_) return WaitStatus::kTimeout;
  if (now < next_check()) return WaitStatus::kNone;
  next_check_ = now + kCheckInterval;
  return is_interrupted_ && is_interrupted_() ? WaitStatus::kInterrupted : WaitStatus::kNone;
}

WaitGuard::Clock::time_point WaitGuard::next_check() {
  if (next_check_ == Clock::time_point()) next_check_ = Clock::now() + kCheckInterval;
  return std::min(deadline_, next_check_);
}

void WaitGuard::sleep(std::unique_lock<std::mutex>& lock, std::condition_variable& news) {
  news.wait_until(lock, next_check());
  // By the clock: news may come more often.
  if (Clock::now() < next_check()) return;
  lock.unlock();
  std::ignore = check();
  lock.lock();
}

void WaitGuard::start(const WaitLimits& limits) {
  deadline_ = deadline_after(limits.timeout);
  next_check_ = {};
  is_interrupted_ = limits.is_interrupted;
}

}  // namespace ringcomm
