#include "collectives/watch_thread.h"

#include <algorithm>
#include <utility>

namespace ringcomm {

WatchThread::WatchThread(const char* name, Pace pace, std::function<bool()> look)
    : pace_(pace), look_(std::move(look)) {
  thread_ = start_background_thread(name, [this] { run(); });
}

WatchThread::~WatchThread() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void WatchThread::wake() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(looks_left_, pace_.num_looks) == 0) changed_.notify_all();
}

void WatchThread::stay_awake() {
  const std::lock_guard lock(mutex_);
  is_awake_ = true;
  changed_.notify_all();
}

void WatchThread::run() {
  std::unique_lock lock(mutex_);
  while (!is_over_) {
    if (looks_left_ == 0 && !is_awake_) {
      changed_.wait(lock);
      continue;
    }
    looks_left_ = std::max<std::int64_t>(looks_left_ - 1, 0);
    changed_.wait_for(lock, pace_.interval, [this] { return is_over_; });
    if (is_over_) return;
    lock.unlock();
    const bool goes_on = look_();
    lock.lock();
    if (!goes_on) return;
  }
}

}  // namespace ringcomm
