#include "collectives/ordered_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "collectives/trace.h"
#include "core/errors.h"

namespace ringcomm {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

trace::Event wait_for_queue() {
  return {.kind = trace::Kind::kWait, .name = trace::name_number("queue")};
}

}  // namespace

OrderedQueue::~OrderedQueue() {
  drain({});
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  has_work_.notify_all();
  if (progress_thread_.joinable()) progress_thread_.join();
}

// Runs tasks until `is_over`, or sleeps while another thread does.
template <class IsOver>
void OrderedQueue::run_or_sleep(std::unique_lock<std::mutex>& lock, const IsOver& is_over,
                                const Poll& poll, Clock::time_point deadline, bool may_run) {
  std::optional<trace::Span> traced;
  while (!is_over() && Clock::now() < deadline) {
    if (may_run && !is_left_to_thread_ && !is_running_ && !entries_.empty()) {
      traced.reset();
      run_front(lock);
      continue;
    }
    if (!traced) traced.emplace(wait_for_queue);
    ++num_waiting_;
    const auto until = std::min(deadline, Clock::now() + kPollInterval);
    const bool is_timeout = has_news_.wait_until(lock, until) == std::cv_status::timeout;
    --num_waiting_;
    if (is_timeout && poll) {
      lock.unlock();
      poll();
      lock.lock();
    }
  }
}

void OrderedQueue::check_not_in_task() const {
  if (is_running_ && running_thread_ == std::this_thread::get_id())
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: a collective was called inside another one of its group, perhaps from "
                "a signal handler; this would deadlock");
}

// Called and left with the lock held; the task runs without it. Wakes other threads only if there
// is work for them, because a wake-up costs more than a small collective.
void OrderedQueue::run_unlocked(std::unique_lock<std::mutex>& lock, const Task& task) {
  is_running_ = true;
  running_thread_ = std::this_thread::get_id();
  lock.unlock();
  task();
  lock.lock();
  is_running_ = false;
  if (num_waiting_ > 0) has_news_.notify_all();
  if (!entries_.empty()) has_work_.notify_one();
}

void OrderedQueue::run_front(std::unique_lock<std::mutex>& lock) {
  const Ticket entry = std::move(entries_.front());
  entries_.pop_front();
  run_unlocked(lock, [&] {
    entry->task();
    entry->task = nullptr;  // frees what it holds (tensors)
  });
  entry->is_done = true;
}

void OrderedQueue::run(const Task& task, const Poll& poll) {
  if (is_left_to_thread_) {
    wait(submit(task), poll);
    return;
  }
  Ticket ticket;
  {
    std::unique_lock lock(mutex_);
    if (!is_running_ && entries_.empty()) {
      run_unlocked(lock, task);
      return;
    }
    check_not_in_task();
    ticket = std::make_shared<Entry>(Entry{.task = task});
    entries_.push_back(ticket);
  }
  wait(ticket, poll);
}

OrderedQueue::Ticket OrderedQueue::submit(Task task) {
  auto ticket = std::make_shared<Entry>(Entry{.task = std::move(task)});
  {
    const std::lock_guard lock(mutex_);
    if (!progress_thread_.joinable())
      progress_thread_ = start_background_thread("ringcomm-queue", [this] { progress(); });
    entries_.push_back(ticket);
  }
  has_work_.notify_one();
  return ticket;
}

void OrderedQueue::wait(const Ticket& ticket, const Poll& poll) {
  std::unique_lock lock(mutex_);
  if (!ticket->is_done) check_not_in_task();
  run_or_sleep(lock, [&] { return ticket->is_done; }, poll);
}

bool OrderedQueue::wait_until(const Ticket& ticket, Clock::time_point deadline, const Poll& poll) {
  std::unique_lock lock(mutex_);
  run_or_sleep(lock, [&] { return ticket->is_done; }, poll, deadline, /*may_run=*/false);
  return ticket->is_done;
}

void OrderedQueue::drain(const Poll& poll) {
  std::unique_lock lock(mutex_);
  run_or_sleep(lock, [this] { return !is_running_ && entries_.empty(); }, poll);
}

void OrderedQueue::progress() {
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    if (!is_running_ && !entries_.empty()) {
      run_front(lock);
    } else {
      has_work_.wait(lock);
    }
  }
}

}  // namespace ringcomm
