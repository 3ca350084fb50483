#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/background_thread.h"

namespace ringcomm {

/// Runs tasks one at a time, in the order in which they were put in, on whichever thread is there
/// to do it: the caller of run() when nothing is before its task (no hand-over to another thread,
/// which would cost 5-70 us), the caller of wait(), or a progress thread, which is started by the
/// first submit().
class OrderedQueue {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;  ///< must not throw
  /// Called every 50 ms by a thread that waits while another one runs its task; must not throw.
  using Poll = std::function<void()>;

  struct Entry {
    Task task;
    bool is_done = false;  // guarded by the queue's mutex
  };
  using Ticket = std::shared_ptr<Entry>;

  OrderedQueue() = default;
  /// Runs the tasks that are in, then ends the progress thread.
  ~OrderedQueue();
  OrderedQueue(const OrderedQueue&) = delete;
  OrderedQueue& operator=(const OrderedQueue&) = delete;

  /// From here on the progress thread runs all tasks, and callers sleep: for tasks that cannot poll
  /// for signals. Called before any other function.
  void leave_to_thread() { is_left_to_thread_ = true; }

  /// Runs `task` in this thread after all tasks before it, which it runs too if nobody else does.
  /// Throws Error where the thread is in a task already (a signal handler that interrupted it): it
  /// would wait for itself.
  void run(const Task& task, const Poll& poll);
  /// Puts `task` in and returns. Throws std::system_error where the progress thread cannot be had.
  Ticket submit(Task task);
  /// Returns when the task is done; runs tasks until then if nobody else does. Throws as run()
  /// does.
  void wait(const Ticket& ticket, const Poll& poll);
  /// Leaves the work to other threads and waits until `deadline` at most. False when the task is
  /// not done then.
  bool wait_until(const Ticket& ticket, Clock::time_point deadline, const Poll& poll);
  bool is_done(const Ticket& ticket);
  /// Returns when no task is left; runs tasks until then if nobody else does.
  void drain(const Poll& poll);

 private:
  void check_not_in_task() const;
  void run_front(std::unique_lock<std::mutex>& lock);
  void run_unlocked(std::unique_lock<std::mutex>& lock, const Task& task);
  template <class IsOver>
  void run_or_sleep(std::unique_lock<std::mutex>& lock, const IsOver& is_over, const Poll& poll);
  bool may_run_front() const { return !is_left_to_thread_ && !is_running_ && !entries_.empty(); }
  void progress();

  std::mutex mutex_;
  std::condition_variable has_work_;  // the progress thread sleeps here
  std::condition_variable has_news_;  // everybody else does
  std::deque<Ticket> entries_;
  int num_waiting_ = 0;  // threads at has_news_
  std::thread::id running_thread_;
  bool is_running_ = false;  // a task, on some thread
  bool is_stopping_ = false;
  bool is_left_to_thread_ = false;
  BackgroundThread progress_thread_;
};

}  // namespace ringcomm
