#include "transport/messages/store_membership.h"

#include <chrono>
#include <cstdlib>
#include <exception>

namespace ringcomm {
namespace {

// How long the reason for an abort may take to get here after the abort.
constexpr std::chrono::milliseconds kReasonGrace{2000};

}  // namespace

StoreMembership::StoreMembership(KeyValueStore& store, shm::Rendezvous& ranks)
    : rank_(ranks.rank()), store_(store.clone()), processes_(ranks.processes()) {
  // How often this rank has made a group over this store: the same on all ranks, and what tells
  // this group's keys from those of one that was destroyed before.
  const std::int64_t generation =
      store.add("ringcomm/messages/generation/" + std::to_string(rank_), 1);
  prefix_ = "ringcomm/messages/" + std::to_string(generation) + "/";
  const auto key_of = [this](int rank) { return prefix_ + "rank/" + std::to_string(rank); };
  store.set(key_of(rank_), ranks.mine().to_text());
  for (int peer = 0; peer < ranks.world_size(); ++peer) {
    records_.push_back(RankRecord::from_text(ranks.wait_for(key_of(peer), peer)));
    const RankRecord& theirs = records_.back();
    if (theirs.options != ranks.mine().options)
      throw Error({.kind = ErrorKind::kMismatch,
                   .rank = peer,
                   .pid = theirs.pid,
                   .host = theirs.host,
                   .op = "init"},
                  "ringcomm: rank " + std::to_string(rank_) + " and rank " + std::to_string(peer) +
                      " made the group with different options: {" + ranks.mine().options +
                      "} and {" + theirs.options + "}");
  }
}

void StoreMembership::leave() {
  try {
    store_->set(prefix_ + "left/" + std::to_string(rank_), std::to_string(num_calls_.load()));
  } catch (const std::exception&) {
    // The store is lost, and most likely the program with it.
  }
}

void StoreMembership::keep(const AbortReason& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return;
    reason_ = reason;
  }
  has_reason_.notify_all();
  if (end_waits_) end_waits_();
}

Stop StoreMembership::state_of(int) const {
  const std::lock_guard lock(mutex_);
  return reason_.has_value() ? Stop::kAborted : Stop::kNone;
}

bool StoreMembership::is_alive(int rank) const {
  // If a rank is a thread of this process, the process does not tell whether the rank lives.
  const std::string& address = process_of(rank).bootstrap_address;
  return !address.empty() && address != record_of(rank_).bootstrap_address && !has_died(rank);
}

bool StoreMembership::is_given_up(bool asks) noexcept {
  try {
    if (asks) return look();
  } catch (const std::exception&) {
    // No store, no news.
  }
  return state_of(rank_) == Stop::kAborted;
}

void StoreMembership::abort(const AbortReason& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return;
  }
  // This rank's waits end first, because the store may be slow or lost.
  keep(reason);
  try {
    store_->set_first(prefix_ + "abort", reason.to_text());
  } catch (const std::exception&) {
    // The other ranks notice the failure themselves.
  }
}

AbortReason StoreMembership::abort_reason() const {
  std::unique_lock lock(mutex_);
  has_reason_.wait_for(lock, kReasonGrace, [this] { return reason_.has_value(); });
  if (reason_) return *reason_;
  return {.kind = ErrorKind::kAborted,
          .origin = rank_,
          .culprit = rank_,
          .text = "its messages were aborted, and no rank has reported why"};
}

bool StoreMembership::look() {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return true;
  }
  std::string text;
  if (!store_->try_get(prefix_ + "abort", text)) return false;
  keep(AbortReason::from_text(text));
  return true;
}

void StoreMembership::lose_store(const std::string& why) {
  keep({.kind = ErrorKind::kSystem,
        .origin = rank_,
        .culprit = -1,
        .text = "the group's store can no longer be reached (" + why +
                "); the process that serves it, usually rank 0, has probably ended"});
}

bool StoreMembership::has_left(int rank) {
  std::string text;
  if (!store_->try_get(prefix_ + "left/" + std::to_string(rank), text)) return false;
  const std::lock_guard lock(mutex_);
  num_calls_of_[rank] = std::strtoll(text.c_str(), nullptr, 10);
  return true;
}

std::int64_t StoreMembership::num_calls_of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = num_calls_of_.find(rank);
  return found != num_calls_of_.end() ? found->second : -1;
}

LookForRanks look_for(shm::Rendezvous& ranks) {
  return [&ranks](int missing) {
    ranks.look(missing, "rank " + std::to_string(missing) + " did not connect to the others");
  };
}

}  // namespace ringcomm
