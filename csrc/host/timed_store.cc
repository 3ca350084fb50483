#include "host/timed_store.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <system_error>
#include <type_traits>
#include <utility>

#include "core/errors.h"

namespace ringcomm {

// A store that takes longer than this is silent.
constexpr std::chrono::milliseconds kSilentAfter{1000};

// Of one object and its thread.
struct TimedStore::Queue {
  const std::shared_ptr<KeyValueStore> store;
  std::mutex mutex = {};  // guards the next ones
  std::condition_variable changed = {};
  std::deque<std::function<void()>> calls = {};  // the first is being made
  Clock::time_point since = {};                  // when it began
  bool has_thread = false;
  bool is_over = false, has_ended = false;
  std::shared_future<std::optional<std::string>> asked = {}, answered = {};

  // When a call is late; with the lock held, as the next one.
  Clock::time_point limit() const { return (calls.empty() ? Clock::now() : since) + kSilentAfter; }

  template <class Ask>
  auto push(Ask ask) {
    using Result = std::invoke_result_t<Ask, KeyValueStore&>;
    const auto task = std::make_shared<std::packaged_task<Result()>>(
        [this, ask = std::move(ask)] { return ask(*store); });
    if (calls.empty()) since = Clock::now();
    if (has_thread)
      calls.push_back([task] { (*task)(); });
    else
      (*task)();
    changed.notify_all();
    return task->get_future();
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return is_over || !calls.empty(); });
      if (calls.empty()) break;
      lock.unlock();
      calls.front()();
      lock.lock();
      calls.pop_front();
      since = Clock::now();
    }
    has_ended = true;
    changed.notify_all();
  }
};

TimedStore::TimedStore(std::shared_ptr<KeyValueStore> store, Clock::time_point deadline)
    : deadline_(deadline), queue_(new Queue{.store = std::move(store)}) {
  try {
    thread_ = start_background_thread("ringcomm-store", [queue = queue_] { queue->run(); });
    queue_->has_thread = true;
  } catch (const std::system_error&) {
    // No thread is to be had: the callers ask, and may wait as long as the store does.
  }
}

TimedStore::~TimedStore() {
  if (!queue_->has_thread) return;
  std::unique_lock lock(queue_->mutex);
  queue_->is_over = true;
  queue_->changed.notify_all();
  const bool has_ended =
      queue_->changed.wait_until(lock, queue_->limit(), [this] { return queue_->has_ended; });
  lock.unlock();
  has_ended ? thread_.join() : thread_.detach();
}

template <class Ask>
auto TimedStore::call(Ask ask) {
  std::unique_lock lock(queue_->mutex);
  const Clock::time_point limit = std::max(deadline_, queue_->limit());
  auto answer = queue_->push(std::move(ask));
  lock.unlock();
  while (answer.wait_until(std::min(limit, Clock::now() + kLookInterval)) !=
         std::future_status::ready) {
    if (is_interrupted())
      throw Error({.kind = ErrorKind::kInterrupted, .op = "store"},
                  "ringcomm: interrupted by a signal while the group's store was asked");
    if (Clock::now() >= limit)
      throw Error({.kind = ErrorKind::kTimeout, .op = "store"},
                  "ringcomm: the group's store does not answer; the process that serves it, "
                  "usually rank 0 or the launcher, may be stopped, or its host unreachable");
  }
  return answer.get();
}

void TimedStore::set(const std::string& key, const std::string& value) {
  call([=](KeyValueStore& store) { store.set(key, value); });
}

std::optional<std::string> TimedStore::try_get(const std::string& key) {
  return call([=](KeyValueStore& store) { return store.try_get(key); });
}

std::optional<std::string> TimedStore::peek(const std::string& key) {
  const std::lock_guard lock(queue_->mutex);
  auto& asked = queue_->asked;
  if (asked.valid() && asked.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
    queue_->answered = std::exchange(asked, {});
  if (!asked.valid())
    asked = queue_->push([=](KeyValueStore& store) { return store.try_get(key); });
  return queue_->answered.valid() ? queue_->answered.get() : std::nullopt;
}

void TimedStore::set_first(const std::string& key, const std::string& value) {
  call([=](KeyValueStore& store) { store.set_first(key, value); });
}

bool TimedStore::is_interrupted() { return queue_->store->is_interrupted(); }

std::unique_ptr<KeyValueStore> TimedStore::clone() { return queue_->store->clone(); }

}  // namespace ringcomm
