#include "transport/messages/message_group.h"

#include <algorithm>
#include <cstdlib>

#include "core/errors.h"

namespace ringcomm {

constexpr std::chrono::milliseconds kWatchInterval{100};  // how late a wait may end
// After so many checks with nothing to watch, the watchdog sleeps until an operation wakes it,
// which costs that operation some microseconds.
constexpr int kIdleChecks = 10;
// Messages that a process sent before its end arrive within so many checks on the same machine:
// half a second, or more on a busy machine, where any time may pass without a thread's turn.
constexpr int kChecksForReason = 5;
// A store that is unreachable for this long is lost.
constexpr std::chrono::milliseconds kStoreGrace{1000};
// How long a live rank that has closed its connection may take to report why, and the reason for an
// abort to get here after the abort.
constexpr std::chrono::milliseconds kReasonGrace{2000};

MessageGroup::MessageGroup(KeyValueStore& store, host::Rendezvous& ranks)
    : rank_(ranks.rank()),
      store_(store.clone(), ranks.deadline()),
      address_(ranks.mine().bootstrap_address) {
  // Each attempt of a rank to make the group has a key of its own, which its record has. Rank 0
  // names the group to the others' attempts, they enter it, and once all have, rank 0 says which:
  // the others ask rank 0 alone.
  // What an earlier group or attempt over this store has left, also on some ranks only, has other
  // keys.
  const std::string& mine = ranks.mine().memory_key;
  const auto name_for = [](const std::string& attempt) {
    return "ringcomm/messages/for/" + attempt;
  };
  const auto entry_of = [&](int rank) { return prefix_ + "rank/" + std::to_string(rank); };
  const auto enter = [&](const std::string& name) {
    key_ = name;
    prefix_ = "ringcomm/messages/" + name + "/";
    store_.set(entry_of(rank_), mine);
  };
  std::vector<std::string> attempts(static_cast<std::size_t>(ranks.world_size()), mine);
  std::string all;
  const auto has_all = [&] {
    if (const auto name = store_.try_get(name_for(mine)); name && name != key_) enter(*name);
    if (key_.empty()) return false;
    all = store_.try_get(prefix_ + "all").value_or("");
    return !all.empty();
  };
  if (rank_ == 0) {
    enter(mine);
    ranks.wait_for_all([&](int peer) {
      // The record first: a peer that has entered is in no later attempt then.
      const std::string attempt = attempts[static_cast<std::size_t>(peer)] = ranks.key_of(peer);
      if (store_.try_get(entry_of(peer)) == attempt) return true;
      store_.set(name_for(attempt), key_);
      return false;
    });
    for (const std::string& attempt : attempts) all += attempt + " ";
    store_.set(prefix_ + "all", all);
  } else {
    const auto has_entered = [&](int peer) {
      return peer == 0 ? has_all() : !key_.empty() && store_.try_get(entry_of(peer)).has_value();
    };
    ranks.wait_for_all(has_entered, has_all);
  }
  ranks.expect(all);
  processes_ = ranks.processes();
  for (int rank = 0; rank < ranks.world_size(); ++rank)
    global_ranks_.push_back(ranks.global_rank_of(rank));
  store_.forget_deadline();
}

void MessageGroup::leave() {
  watch_.reset();
  if (state_of(rank_) == WaitStatus::kAborted) return;  // they know, and the store may be lost
  try {
    store_.set(prefix_ + "left/" + std::to_string(rank_), std::to_string(num_calls_.load()));
  } catch (const std::exception&) {
    // The store is lost, and most likely the program with it.
  }
}

WaitStatus MessageGroup::state_of(int) const {
  const std::lock_guard lock(mutex_);
  return reason_.has_value() ? WaitStatus::kAborted : WaitStatus::kNone;
}

// Whether `rank` has destroyed its side of the group.
bool MessageGroup::ask_left(int rank) {
  const auto text = store_.try_get(prefix_ + "left/" + std::to_string(rank));
  if (!text) return false;
  const std::lock_guard lock(mutex_);
  num_calls_of_[rank] = std::strtoll(text->c_str(), nullptr, 10);
  return true;
}

std::int64_t MessageGroup::num_calls_of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = num_calls_of_.find(rank);
  return found != num_calls_of_.end() ? found->second : -1;
}

// ---- The end of the group.

void MessageGroup::abort(const AbortReason& reason) {
  if (state_of(rank_) == WaitStatus::kAborted) return;
  // This rank's waits end first, because the store may be slow or lost.
  keep(reason);
  try {
    store_.set_first(prefix_ + "abort", reason.to_text());
  } catch (const std::exception&) {
    // The other ranks notice the failure themselves.
  }
}

void MessageGroup::keep(const AbortReason& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return;
    reason_ = reason;
  }
  has_reason_.notify_all();
  if (on_abort_) on_abort_();
  if (messenger_ != nullptr) messenger_->abort();
}

AbortReason MessageGroup::abort_reason() const {
  std::unique_lock lock(mutex_);
  has_reason_.wait_for(lock, kReasonGrace, [this] { return reason_.has_value(); });
  if (reason_) return *reason_;
  return {.kind = ErrorKind::kAborted,
          .origin = rank_,
          .culprit = rank_,
          .text = "its messages were aborted, and no rank has reported why"};
}

bool MessageGroup::is_aborted(bool asks) noexcept {
  try {
    if (asks) return check_store(/*waits=*/false);
  } catch (const std::exception&) {
    // No store, no news.
  }
  return state_of(rank_) == WaitStatus::kAborted;
}

// Reads the store, or its last answer. Whether the group has ended; throws what the store
// does.
bool MessageGroup::check_store(bool waits) {
  if (state_of(rank_) == WaitStatus::kAborted) return true;
  const std::string key = prefix_ + "abort";
  const auto text = waits ? store_.try_get(key) : store_.peek(key);
  if (text) keep(AbortReason::from_text(*text));
  return text.has_value();
}

// ---- The watchdog.

MessageGroup::Operation::Operation(MessageGroup& group, Clock::time_point deadline)
    : group_(group), deadline_(deadline) {
  const std::lock_guard lock(group.mutex_);
  if (!group.watch_)
    group.watch_.emplace(WatchThread::Pace{.interval = kWatchInterval, .num_looks = kIdleChecks},
                         [&group] {
                           group.watch_operations();
                           return true;
                         });
  group.operations_.insert(this);
  group.watch_->wake();
}

void MessageGroup::Operation::set_deadline(Clock::time_point deadline) {
  const std::lock_guard lock(group_.mutex_);
  deadline_ = deadline;
}

MessageGroup::Operation::~Operation() {
  const std::lock_guard lock(group_.mutex_);
  group_.operations_.erase(this);
}

void MessageGroup::Operation::await(int peer) {
  const std::lock_guard lock(group_.mutex_);
  peer_ = peer;
  num_checks_gone_ = 0;
}

WaitStatus MessageGroup::Operation::stop_of(MessageEnd end, int peer) {
  if (end == MessageEnd::kAborted) {
    const std::lock_guard lock(group_.mutex_);
    if (stop_ != WaitStatus::kPeerDied)
      return stop_ != WaitStatus::kNone ? stop_ : WaitStatus::kAborted;
  }
  // A rank that fails or leaves reports it before it closes its connections.
  const auto deadline = Clock::now() + kReasonGrace;
  const auto may_say_why = [&] {
    if (peer == Messenger::kAnySource || Clock::now() >= deadline) return false;
    // If a rank is a thread of this process, the process does not tell whether the rank lives.
    const std::string& address = group_.process_of(peer).bootstrap_address;
    const bool is_known = !address.empty() && address != group_.address_;
    return (end == MessageEnd::kDone || is_known) && !group_.has_died(peer);
  };
  try {
    for (Backoff backoff;; backoff.sleep()) {
      const bool is_last = !may_say_why();
      // Before the store, because a rank reports before it leaves.
      const bool has_left = peer != Messenger::kAnySource && group_.ask_left(peer);
      if (group_.check_store(/*waits=*/true)) return WaitStatus::kAborted;
      if (has_left) return WaitStatus::kPeerLeft;
      if (is_last) break;
    }
  } catch (const std::exception&) {
    // No store, or none that answers: its host may be the peer that died.
  }
  return WaitStatus::kPeerDied;
}

// Whether no message of `peer` can come any more, with the lock held.
bool MessageGroup::is_gone(int peer) const {
  if (peer != Messenger::kAnySource) return peer >= 0 && has_died(peer);
  for (int rank = 0; rank < static_cast<int>(processes_.size()); ++rank)
    if (rank != rank_ && !has_died(rank) && !num_calls_of_.contains(rank)) return false;
  return true;
}

// Whether it is over now, with the lock held.
bool MessageGroup::must_end(Operation& operation) const {
  if (operation.stop_ != WaitStatus::kNone) return false;
  if (Clock::now() >= operation.deadline_) operation.stop_ = WaitStatus::kTimeout;
  if (is_gone(operation.peer_) && ++operation.num_checks_gone_ > kChecksForReason)
    operation.stop_ = WaitStatus::kPeerDied;
  return operation.stop_ != WaitStatus::kNone;
}

void MessageGroup::watch_operations() {
  bool must_abort = false;
  bool awaits_any = false;
  {
    const std::lock_guard lock(mutex_);
    if (operations_.empty()) return;
    watch_->wake();  // and checks again
    for (Operation* operation : operations_) {
      must_abort |= must_end(*operation);
      awaits_any |= operation->peer_ == Messenger::kAnySource;
    }
  }
  if (must_abort) messenger_->abort();
  try {
    if (awaits_any) ask_left(num_asked_++ % static_cast<int>(processes_.size()));
  } catch (const std::exception&) {
    // The next check judges the store.
  }
  try {
    check_store(/*waits=*/false);  // not at the store of a group that has ended
    store_fails_since_ = Clock::time_point::max();
  } catch (const std::exception& error) {
    store_fails_since_ = std::min(store_fails_since_, Clock::now());
    if (Clock::now() - store_fails_since_ < kStoreGrace) return;
    keep({.kind = ErrorKind::kSystem,
          .origin = rank_,
          .culprit = -1,
          .text = std::string("the group's store can no longer be reached (") + error.what() +
                  "); the process that serves it, usually rank 0, has probably ended"});
  }
}

}  // namespace ringcomm
