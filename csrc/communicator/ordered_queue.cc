#include "communicator/ordered_queue.h"

#include <optional>
#include <utility>

#include "collectives/trace.h"
#include "core/errors.h"
#include "host/thread_pool.h"

namespace ringcomm {

OrderedQueue::~OrderedQueue() {
  drain({});
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  has_work_.notify_all();
  if (progress_thread_.joinable()) progress_thread_.join();
}

// Runs tasks until `is_over`, or sleeps while another thread does and if there is a deadline.
template <class IsOver>
void OrderedQueue::run_or_sleep(std::unique_lock<std::mutex>& lock, const IsOver& is_over,
                                const Poll& poll, Clock::time_point deadline) {
  const bool may_run = deadline == Clock::time_point::max() && !is_left_to_thread_;
  std::optional<recorder::Span> traced;
  WaitGuard guard(deadline, [&] {
    const OrderedQueue* const outer = std::exchange(polled_, this);
    if (poll) poll();
    polled_ = outer;
    return false;
  });
  ++num_waiting_;
  state_.fetch_or(kShared);
  while (!is_over() && !guard.is_late()) {
    if (may_run && !is_running() && !entries_.empty()) {
      traced.reset();
      run_front(lock);
      continue;
    }
    if (!traced) traced.emplace([] { return recorder::Event{.kind = recorder::Kind::kQueue}; });
    guard.sleep(lock, has_news_);
  }
  --num_waiting_;
  end_sharing();
}

bool OrderedQueue::is_inside() const { return polled_ == this || is_in_task(); }

void OrderedQueue::check_not_in_task() const {
  if (is_in_task())
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: a collective was called inside another one of its group, perhaps from "
                "a signal handler; this would deadlock");
}

// With the mutex.
void OrderedQueue::end_sharing() {
  if (entries_.empty() && num_waiting_ == 0) state_.fetch_and(~kShared);
}

// With the mutex. Wakes other threads only if there is work for them, because a wake-up costs more
// than a small collective.
void OrderedQueue::end_task() {
  state_.fetch_and(~kRunning);
  if (num_waiting_ > 0) has_news_.notify_all();
  if (!entries_.empty()) has_work_.notify_one();
}

// Calls run(the first of its numbers) if no other task is there; else returns false.
template <class Run>
bool OrderedQueue::try_run(std::uint64_t num_numbers, const Run& run) {
  std::uint64_t state = state_.load(std::memory_order_relaxed);
  do
    if ((state & (kRunning | kShared)) != 0) return false;
  while (!state_.compare_exchange_weak(state, state + num_numbers * kOneNumber + kRunning,
                                       std::memory_order_acquire));
  running_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  run(state / kOneNumber);
  running_thread_.store({}, std::memory_order_relaxed);
  state = state_.load(std::memory_order_relaxed);
  do
    if ((state & kShared) != 0) {
      const std::lock_guard lock(mutex_);
      end_task();
      break;
    }
  while (!state_.compare_exchange_weak(state, state & ~kRunning, std::memory_order_release));
  return true;
}

void OrderedQueue::run_if_idle(const std::function<void()>& task) {
  try_run(0, [&](std::uint64_t) { task(); });
}

// With the mutex, so that numbers have the order of the entries.
OrderedQueue::Request OrderedQueue::push(Task task) {
  auto entry = std::make_shared<Entry>(Entry{.task = std::move(task), .number = 0});
  entries_.push_back(entry);
  state_.fetch_or(kShared);
  entry->number = state_.fetch_add(kOneNumber) / kOneNumber;
  return entry;
}

// Called and left with the lock held; the task runs without it.
void OrderedQueue::run_front(std::unique_lock<std::mutex>& lock) {
  const Request entry = std::move(entries_.front());
  entries_.pop_front();
  state_.fetch_or(kRunning);  // kShared is set: there was an entry
  running_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  lock.unlock();
  entry->task(entry->number);
  entry->task = nullptr;  // frees what it holds (tensors)
  running_thread_.store({}, std::memory_order_relaxed);
  lock.lock();
  entry->is_done = true;
  end_task();
  end_sharing();
}

void OrderedQueue::run(const Task& task, const Poll& poll) {
  if (is_left_to_thread_) {
    check_not_in_task();  // before a reference to this caller's stack is in the queue
    wait(submit(task), poll);
    return;
  }
  if (try_run(1, task)) return;
  std::unique_lock lock(mutex_);
  check_not_in_task();
  const Request request = push(task);
  run_or_sleep(lock, [&] { return request->is_done; }, poll);
}

OrderedQueue::Request OrderedQueue::submit(Task task) {
  Request request;
  {
    const std::lock_guard lock(mutex_);
    if (!progress_thread_.joinable())
      progress_thread_ = start_background_thread("ringcomm-queue", [this] { progress(); });
    request = push(std::move(task));
  }
  has_work_.notify_one();
  return request;
}

bool OrderedQueue::wait(const Request& request, const Poll& poll, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  if (!request->is_done && deadline == Clock::time_point::max()) check_not_in_task();
  run_or_sleep(lock, [&] { return request->is_done; }, poll, deadline);
  return request->is_done;
}

void OrderedQueue::drain(const Poll& poll) {
  std::unique_lock lock(mutex_);
  run_or_sleep(lock, [this] { return !is_running() && entries_.empty(); }, poll);
}

void OrderedQueue::progress() {
  host::leave_thread_team();
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    if (!is_running() && !entries_.empty())
      run_front(lock);
    else
      has_work_.wait(lock);
  }
}

}  // namespace ringcomm
