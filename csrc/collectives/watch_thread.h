#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "transport/background_thread.h"

namespace ringcomm {

/// A thread that looks at something every so often while that goes on, and sleeps otherwise.
class WatchThread {
 public:
  struct Pace {
    std::chrono::milliseconds interval;
    /// After wake(). Looks and not time, of which a busy machine may let pass any without a look.
    std::int64_t num_looks;
  };

  /// `look` returns whether to look again, ever; it throws nothing.
  WatchThread(const char* name, Pace pace, std::function<bool()> look);
  ~WatchThread();
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  /// From any thread, `look` among them.
  void wake();
  /// It never sleeps from here on.
  void stay_awake();

 private:
  void run();

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
