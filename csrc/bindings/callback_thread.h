#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ringcomm {

/// Runs the continuations of futures, one after another, on one thread per process: never on a
/// thread that moves data, so that a continuation may issue a collective and wait for it.
class CallbackThread {
 public:
  /// Starts the thread when it is first asked for; never ends it.
  static CallbackThread& instance();

  void post(std::function<void()> callback);

 private:
  CallbackThread();
  void run();

  pid_t owner_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::deque<std::function<void()>> callbacks_;
};

}  // namespace ringcomm
