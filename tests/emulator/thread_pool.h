#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace ringcomm::emulator {

/// Threads that are kept for the next task. Every task that was started runs at once, on a thread
/// of its own: tasks may wait for each other.
class ThreadPool {
 public:
  static ThreadPool& of_process();
  void start(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<std::function<void()>> tasks_;
  std::size_t num_idle_ = 0;
};

}  // namespace ringcomm::emulator
