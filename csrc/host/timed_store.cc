#include "host/timed_store.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <system_error>
#include <type_traits>
#include <utility>

#include "core/errors.h"
#include "host/threads.h"

namespace ringcomm {

// A store that takes longer than this is silent.
constexpr std::chrono::milliseconds kSilentAfter{1000};

// Of one object, and of the thread that makes its calls.
struct TimedStore::Queue : std::enable_shared_from_this<Queue> {
  explicit Queue(std::shared_ptr<KeyValueStore> its_store) : store(std::move(its_store)) {}

  std::shared_ptr<KeyValueStore> store;
  std::mutex mutex;  // guards the next ones
  std::condition_variable changed;
  std::deque<std::function<void()>> calls;  // the first is being made
  Clock::time_point since;                  // when it began
  std::shared_future<std::optional<std::string>> asked, answered;

  // When a call is late; with the lock held, as the next one.
  Clock::time_point limit() const { return (calls.empty() ? Clock::now() : since) + kSilentAfter; }

  template <class Ask>
  auto push(Ask ask) {
    using Result = std::invoke_result_t<Ask, KeyValueStore&>;
    const auto task = std::make_shared<std::packaged_task<Result()>>(
        [this, ask = std::move(ask)] { return ask(*store); });
    calls.push_back([task] { (*task)(); });
    if (calls.size() > 1) return task->get_future();
    since = Clock::now();
    try {
      run_aside([queue = this->shared_from_this()] { queue->run(); });
    } catch (const std::system_error&) {  // no thread is to be had
      calls.clear();
      (*task)();
    }
    return task->get_future();
  }

  void run() {
    std::unique_lock lock(mutex);
    while (!calls.empty()) {
      const auto& call = calls.front();  // which push_back() leaves where it is
      lock.unlock();
      call();
      lock.lock();
      calls.pop_front();
      since = Clock::now();
    }
    changed.notify_all();
  }
};

TimedStore::TimedStore(std::shared_ptr<KeyValueStore> store, Clock::time_point deadline)
    : deadline_(deadline), queue_(std::make_shared<Queue>(std::move(store))) {}

// An idle store ends here and not on the thread: torch's FileStore writes when it ends, and where
// the process exits in the middle, its readers wait for the rest for ever.
TimedStore::~TimedStore() {
  std::shared_ptr<KeyValueStore> idle;
  std::unique_lock lock(queue_->mutex);
  const auto is_idle = [this] { return queue_->calls.empty(); };
  if (queue_->changed.wait_until(lock, queue_->limit(), is_idle)) idle.swap(queue_->store);
  lock.unlock();
}

template <class Ask>
auto TimedStore::call(Ask ask, bool is_question) {
  const auto throw_silent = [] {
    throw Error({.kind = ErrorKind::kTimeout, .op = "store"},
                "ringcomm: the group's store does not answer; the process that serves it, "
                "usually rank 0 or the launcher, may be stopped, or its host unreachable");
  };
  std::unique_lock lock(queue_->mutex);
  const Clock::time_point limit = std::max(deadline_, queue_->limit());
  // What is to be written is kept, but not the questions of whoever asks again and again.
  if (is_question && limit <= Clock::now()) throw_silent();
  auto answer = queue_->push(std::move(ask));
  lock.unlock();
  WaitGuard guard(limit, [this] { return is_interrupted(); });
  while (answer.wait_until(guard.next_check()) != std::future_status::ready) {
    const WaitStatus status = guard.check();
    if (status == WaitStatus::kInterrupted)
      throw Error({.kind = ErrorKind::kInterrupted, .op = "store"},
                  "ringcomm: interrupted by a signal while the group's store was asked");
    if (status == WaitStatus::kTimeout) throw_silent();
  }
  return answer.get();
}

void TimedStore::set(const std::string& key, const std::string& value) {
  call([=](KeyValueStore& store) { store.set(key, value); });
}

std::optional<std::string> TimedStore::try_get(const std::string& key) {
  return call([=](KeyValueStore& store) { return store.try_get(key); }, /*is_question=*/true);
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
