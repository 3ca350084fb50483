#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

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
  WatchThread(const char* name, Pace pace, std::function<bool()> look);
  ~WatchThread();
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  /// From any thread, `look` among them.
  void wake();
  /// After this call it never sleeps.
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
