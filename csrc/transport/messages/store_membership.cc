#include "transport/messages/store_membership.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <sstream>

#include "transport/wait_limits.h"

namespace ringcomm {
namespace {

// How long the reason for an abort may take to get here after the abort.
constexpr std::chrono::milliseconds kReasonGrace{2000};

std::string to_text(const AbortReason& reason) {
  std::ostringstream text;
  text << static_cast<int>(reason.kind) << ' ' << reason.origin << ' ' << reason.culprit << '\n'
       << reason.text;
  return text.str();
}

AbortReason from_text(const std::string& text) {
  std::istringstream stream(text);
  int kind = 0;
  AbortReason reason;
  stream >> kind >> reason.origin >> reason.culprit;
  reason.kind = static_cast<ErrorKind>(kind);
  const std::size_t line_end = text.find('\n');
  if (line_end != std::string::npos) reason.text = text.substr(line_end + 1);
  return reason;
}

}  // namespace

StoreMembership::StoreMembership(KeyValueStore& store, int rank, int world_size,
                                 const std::string& options, std::chrono::milliseconds timeout)
    : rank_(rank), store_(store.clone()) {
  // How often this rank has made a group over this store: the same on all ranks, and what tells
  // this group's keys from those of one that was destroyed before.
  const std::int64_t generation =
      store.add("ringcomm/messages/generation/" + std::to_string(rank), 1);
  prefix_ = "ringcomm/messages/" + std::to_string(generation) + "/";
  const shm::RankRecord mine{.host_id = shm::host_id(),
                             .host = shm::host_name(),
                             .hub_address = {},
                             .pid = ::getpid(),
                             .memory_key = {},
                             .options = options};
  store.set(prefix_ + "rank/" + std::to_string(rank), mine.to_text());
  const auto deadline = deadline_after(timeout);
  for (int peer = 0; peer < world_size; ++peer) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    std::string text;
    if (!store.get(prefix_ + "rank/" + std::to_string(peer),
                   std::max(left, std::chrono::milliseconds(1)), text))
      throw Error({.kind = ErrorKind::kTimeout, .rank = peer, .op = "init"},
                  "ringcomm rank " + std::to_string(rank) + "/" + std::to_string(world_size) +
                      ": rank " + std::to_string(peer) + " did not join the group in " +
                      std::to_string(timeout.count()) +
                      " ms; read its error, or raise `timeout=` of init_process_group");
    records_.push_back(shm::RankRecord::from_text(text));
    const shm::RankRecord& theirs = records_.back();
    if (theirs.options != options)
      throw Error({.kind = ErrorKind::kMismatch,
                   .rank = peer,
                   .pid = theirs.pid,
                   .host = theirs.host,
                   .op = "init"},
                  "ringcomm: rank " + std::to_string(rank) + " and rank " + std::to_string(peer) +
                      " made the group with different options: {" + options + "} and {" +
                      theirs.options + "}");
  }
}

void StoreMembership::leave() {
  try {
    store_->set(prefix_ + "left/" + std::to_string(rank_), "1");
  } catch (const std::exception&) {
    // The store is gone, and with it most likely the program.
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

void StoreMembership::abort(const AbortReason& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return;
  }
  // This rank's waits end first: the store may be slow, or gone.
  keep(reason);
  try {
    store_->set_first(prefix_ + "abort", to_text(reason));
  } catch (const std::exception&) {
    // The others will notice in their own ways.
  }
}

AbortReason StoreMembership::abort_reason() const {
  std::unique_lock lock(mutex_);
  has_reason_.wait_for(lock, kReasonGrace, [this] { return reason_.has_value(); });
  if (reason_) return *reason_;
  return {.kind = ErrorKind::kAborted,
          .origin = rank_,
          .culprit = rank_,
          .text = "its messages were ended, and nobody has said why"};
}

bool StoreMembership::look() {
  {
    const std::lock_guard lock(mutex_);
    if (reason_) return true;
  }
  std::string text;
  if (!store_->try_get(prefix_ + "abort", text)) return false;
  keep(from_text(text));
  return true;
}

void StoreMembership::lose_store(const std::string& why) {
  keep({.kind = ErrorKind::kSystem,
        .origin = rank_,
        .culprit = -1,
        .text = "the store that the ranks share cannot be reached any more (" + why +
                "); the process that serves it, rank 0 in most programs, has probably ended"});
}

bool StoreMembership::has_left(int rank) {
  std::string text;
  return store_->try_get(prefix_ + "left/" + std::to_string(rank), text);
}

}  // namespace ringcomm
