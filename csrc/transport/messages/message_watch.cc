#include "transport/messages/message_watch.h"

#include <algorithm>
#include <exception>
#include <string>

#include "transport/wait_limits.h"

namespace ringcomm {
namespace {

// How long a rank may take to notice that another one has failed.
constexpr std::chrono::milliseconds kLookInterval{100};
// After this many checks with nothing to watch, the thread sleeps until the next operation wakes
// it, which costs that operation some microseconds.
constexpr int kIdleLooks = 10;
// A store that is unreachable for this long is treated as lost.
constexpr std::chrono::milliseconds kStoreGrace{1000};
// Messages that a process sent before its end arrive within this time on the same machine, and as
// many checks: on a busy machine any time may pass without a thread's turn.
constexpr std::chrono::milliseconds kLastWords{500};
constexpr int kLooksForLastWords = 5;
// How long a live rank that has closed its connection may take to report why.
constexpr std::chrono::milliseconds kReasonGrace{2000};

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

void MessageWatch::Operation::await(int peer) {
  const std::lock_guard lock(watch_.mutex_);
  peer_ = peer;
  num_looks_gone_ = 0;
  is_gone_since_ = Clock::time_point::max();
}

void MessageWatch::Operation::no_source_is_left() {
  const std::lock_guard lock(watch_.mutex_);
  is_orphan_ = true;
}

Stop MessageWatch::Operation::stop_of(MessageEnd end, int peer) {
  if (end == MessageEnd::kAborted) {
    const std::lock_guard lock(watch_.mutex_);
    if (stop_ != Stop::kPeerDied) return stop_ != Stop::kNone ? stop_ : Stop::kAborted;
  }
  // A rank that fails or leaves reports it before it closes its connections.
  const auto deadline = Clock::now() + kReasonGrace;
  try {
    for (Backoff backoff;; backoff.sleep()) {
      const bool may_say_why =
          peer >= 0 && watch_.members_.is_alive(peer) && Clock::now() < deadline;
      if (watch_.members_.look()) return Stop::kAborted;
      if (peer >= 0 && watch_.members_.has_left(peer)) return Stop::kPeerLeft;
      if (!may_say_why) break;
    }
  } catch (const std::exception&) {
    // No store: its host may be the peer that died.
  }
  return Stop::kPeerDied;
}

bool MessageWatch::is_gone(int peer) const {
  if (peer != MessageTransport::kAnySource) return peer >= 0 && members_.has_died(peer);
  for (int rank = 0; rank < transport_.world_size(); ++rank)
    if (rank != transport_.rank() && !members_.has_died(rank)) return false;
  return true;
}

// Whether it is over now, with the lock held.
bool MessageWatch::must_end(Operation& operation, Clock::time_point now) const {
  if (operation.stop_ != Stop::kNone) return false;
  if (now >= operation.deadline_) operation.stop_ = Stop::kTimeout;
  const bool is_orphan = operation.is_orphan_ && operation.peer_ == MessageTransport::kAnySource;
  if (is_orphan || is_gone(operation.peer_)) {
    operation.is_gone_since_ = std::min(operation.is_gone_since_, now);
    if (++operation.num_looks_gone_ > kLooksForLastWords &&
        now - operation.is_gone_since_ >= kLastWords)
      operation.stop_ = Stop::kPeerDied;
  }
  return operation.stop_ != Stop::kNone;
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
      if (operation->stop_ == Stop::kNone) wakes_at_ = std::min(wakes_at_, operation->deadline_);
    has_news_.wait_until(lock, wakes_at_);
    const Clock::time_point now = Clock::now();
    bool must_abort = false;
    for (Operation* operation : operations_) must_abort |= must_end(*operation, now);
    if (is_stopping_ || operations_.empty()) continue;
    lock.unlock();
    if (must_abort) transport_.abort();
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
