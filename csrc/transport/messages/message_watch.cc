#include "transport/messages/message_watch.h"

#include <algorithm>
#include <exception>
#include <string>

namespace ringcomm {
namespace {

// How late a rank learns that another one has given up.
constexpr std::chrono::milliseconds kLookInterval{100};
// After so many looks with nothing to watch the thread sleeps until it is woken, which costs the
// operation that does it some microseconds.
constexpr int kIdleLooks = 10;
// A store that cannot be reached for so long is believed to be gone.
constexpr std::chrono::milliseconds kStoreGrace{1000};

}  // namespace

MessageWatch::~MessageWatch() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  has_news_.notify_all();
  if (thread_.joinable()) thread_.join();
}

MessageWatch::Operation::Operation(MessageWatch& watch, Clock::time_point deadline)
    : watch_(watch), deadline_(deadline) {
  bool must_wake = false;
  {
    const std::lock_guard lock(watch.mutex_);
    if (!watch.thread_.joinable())
      watch.thread_ = start_background_thread("ringcomm-watch", [&watch] { watch.run(); });
    place_ = watch.operations_.insert(watch.operations_.end(), this);
    must_wake = deadline < watch.wakes_at_;
  }
  if (must_wake) watch.has_news_.notify_one();
}

MessageWatch::Operation::~Operation() {
  const std::lock_guard lock(watch_.mutex_);
  watch_.operations_.erase(place_);
}

Stop MessageWatch::Operation::stop_of(MessageEnd end, int peer) {
  if (end == MessageEnd::kAborted) {
    const std::lock_guard lock(watch_.mutex_);
    return is_late_ ? Stop::kTimeout : Stop::kAborted;
  }
  // A rank that gives up says so before it closes its connections, and so does one that leaves.
  try {
    if (watch_.members_.look()) return Stop::kAborted;
    if (watch_.members_.has_left(peer)) return Stop::kPeerLeft;
  } catch (const std::exception&) {
    // No store: its host may be the peer that died.
  }
  return Stop::kPeerDied;
}

void MessageWatch::run() {
  std::unique_lock lock(mutex_);
  int num_idle_looks = 0;
  while (!is_stopping_) {
    num_idle_looks = operations_.empty() ? num_idle_looks + 1 : 0;
    if (num_idle_looks > kIdleLooks) {
      wakes_at_ = Clock::time_point::max();
      has_news_.wait(lock, [this] { return is_stopping_ || !operations_.empty(); });
      continue;
    }
    wakes_at_ = Clock::now() + kLookInterval;
    for (const Operation* operation : operations_)
      if (!operation->is_late_) wakes_at_ = std::min(wakes_at_, operation->deadline_);
    has_news_.wait_until(lock, wakes_at_);
    const Clock::time_point now = Clock::now();
    bool is_any_late = false;
    for (Operation* operation : operations_)
      if (now >= operation->deadline_ && !operation->is_late_)
        is_any_late = operation->is_late_ = true;
    if (is_stopping_ || (operations_.empty() && !is_any_late)) continue;
    lock.unlock();
    if (is_any_late) transport_.abort();
    look();
    lock.lock();
  }
}

void MessageWatch::look() {
  if (is_store_gone_) return;
  try {
    members_.look();
    store_fails_since_ = Clock::time_point::max();
  } catch (const std::exception& error) {
    store_fails_since_ = std::min(store_fails_since_, Clock::now());
    if (Clock::now() - store_fails_since_ < kStoreGrace) return;
    is_store_gone_ = true;
    members_.lose_store(error.what());
  }
}

}  // namespace ringcomm
