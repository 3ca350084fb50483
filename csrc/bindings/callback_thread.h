#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ringcomm {

/// Runs the continuations of futures, one after another, never on a thread that moves data, so that
/// a continuation may issue a collective and wait for it.
///
/// A continuation may also wait for the future of that collective (PowerSGD's do), which a
/// continuation's own thread would have to complete. So there is a thread for each level: futures
/// of works issued by user threads complete on level 0, those of works issued in a continuation on
/// level L complete on level L + 1. Within a level they run in the order of completion.
class CallbackThread {
 public:
  /// Continuations may wait in each other this deep; beyond, levels are shared.
  static constexpr int kNumLevels = 8;

  /// The level for works issued by this thread.
  static int level_of_new_work();
  /// Starts the thread at the first call; it never ends. Throws std::system_error.
  static CallbackThread& at(int level);

  void post(std::function<void()> callback);

 private:
  explicit CallbackThread(int level);
  void run();

  int level_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::deque<std::function<void()>> callbacks_;
};

}  // namespace ringcomm
