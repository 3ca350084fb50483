#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "transport/process.h"

namespace ringcomm {

/// A thread that runs a check periodically while there is work to watch, and sleeps otherwise.
class WatchThread {
 public:
  struct Pace {
    std::chrono::milliseconds interval;
    /// Counted from wake(). It counts checks and not time, because on a busy machine any time may
    /// pass without a check.
    std::int64_t num_looks;
  };

  /// `look` returns whether to look again, ever; it throws nothing.
  WatchThread(const char* name, Pace pace, std::function<bool()> look)
      : pace_(pace), look_(std::move(look)) {
    thread_ = start_background_thread(name, [this] { run(); });
  }
  ~WatchThread() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  /// From any thread, `look` among them.
  void wake() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(looks_left_, pace_.num_looks) == 0) changed_.notify_all();
  }
  /// After this call it never sleeps.
  void stay_awake() {
    const std::lock_guard lock(mutex_);
    is_awake_ = true;
    changed_.notify_all();
  }

 private:
  void run() {
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

  Pace pace_;
  std::function<bool()> look_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::int64_t looks_left_ = 0;
  bool is_awake_ = false;
  bool is_over_ = false;
  BackgroundThread thread_;  // last: it uses all of the above
};

}  // namespace ringcomm
