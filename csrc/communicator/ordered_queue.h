#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "host/threads.h"
#include "host/wait.h"

namespace ringcomm {

/// Runs tasks one at a time, in the order in which they were queued, on one of these threads: the
/// caller of run() if no task is before its own (a switch to another thread costs more than a short
/// call), the caller of wait(), or a progress thread, which the first submit() starts. Tasks have
/// numbers from 0 on, in that order.
class OrderedQueue {
 public:
  using Clock = RunningClock;
  using Task = std::function<void(std::uint64_t number)>;  ///< must not throw
  /// Called every 50 ms by a thread that waits while another one runs its task; must not throw.
  using Poll = std::function<void()>;

  struct Entry {
    Task task;
    std::uint64_t number;
    bool is_done = false;  // guarded by the queue's mutex
  };
  using Request = std::shared_ptr<Entry>;

  /// Runs the tasks that are in, then ends the progress thread.
  ~OrderedQueue();

  /// Lets the progress thread run all tasks while callers sleep, for tasks that cannot poll for
  /// signals. Call it before any other function.
  void leave_to_thread() { is_left_to_thread_ = true; }

  /// Returns when `task` has run, after all earlier ones: in this thread if none is before it,
  /// otherwise in this thread or in the one that runs those. Throws Error if the thread is already
  /// in a task (in a signal handler), which would deadlock.
  void run(const Task& task, const Poll& poll);
  /// Runs `task`, which has no number, in this thread if no other task is there.
  void run_if_idle(const std::function<void()>& task);
  /// Queues `task` and returns. Throws std::system_error if the progress thread cannot be started.
  Request submit(Task task);
  std::uint64_t next_number() const { return state_.load() / kOneNumber; }
  /// Returns true when the task is done; runs tasks until then if no other thread does, and throws
  /// like run(). With a deadline it leaves the work to other threads, and returns false when the
  /// task is not done then.
  bool wait(const Request& request, const Poll& poll,
            Clock::time_point deadline = Clock::time_point::max());
  /// Returns when no task is left; runs tasks until then if no other thread does. Not in a task.
  void drain(const Poll& poll);
  /// Whether this thread is inside a task, or the poll of a wait: in a signal handler, as a rule.
  bool is_inside() const;

 private:
  // The bits of state_, and the next number above them. A thread that finds none of the bits may
  // begin a task without the mutex, and end it without unless kShared has been set meanwhile.
  // kShared is set and cleared with the mutex held.
  static constexpr std::uint64_t kRunning = 1;  // a task, on some thread
  static constexpr std::uint64_t kShared = 2;   // there are entries, or threads in run_or_sleep()
  static constexpr std::uint64_t kOneNumber = 4;

  bool is_running() const { return (state_.load(std::memory_order_acquire) & kRunning) != 0; }
  bool is_in_task() const { return running_thread_.load() == std::this_thread::get_id(); }
  void check_not_in_task() const;
  template <class Run>
  bool try_run(std::uint64_t num_numbers, const Run& run);
  Request push(Task task);
  void run_front(std::unique_lock<std::mutex>& lock);
  void end_task();
  void end_sharing();
  template <class IsOver>
  void run_or_sleep(std::unique_lock<std::mutex>& lock, const IsOver& is_over, const Poll& poll,
                    Clock::time_point deadline = Clock::time_point::max());
  void progress();

  static inline thread_local const OrderedQueue* polled_ = nullptr;  // whose wait calls its poll

  std::mutex mutex_;
  std::condition_variable has_work_;  // the progress thread sleeps here
  std::condition_variable has_news_;  // all other threads wait on it
  std::deque<Request> entries_;
  int num_waiting_ = 0;  // threads in run_or_sleep()
  std::atomic<std::uint64_t> state_ = 0;
  std::atomic<std::thread::id> running_thread_;  // none before and after a task
  bool is_stopping_ = false;
  bool is_left_to_thread_ = false;
  BackgroundThread progress_thread_;
};

}  // namespace ringcomm
