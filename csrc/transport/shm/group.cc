#include "transport/shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringcomm::shm {
namespace {

// Looking for signals takes Python's lock, for which another thread may make us wait: seldom, and
// never in the waits that are over at once.
constexpr std::chrono::milliseconds kLookInterval{50};

// The rendezvous of a group whose ranks must be on one host, when they have found each other.
class OneHost {
 public:
  OneHost(KeyValueStore& store, const GroupIdentity& identity, const SegmentConfig& config,
          std::chrono::milliseconds timeout)
      : rendezvous_(store, identity,
                    {.shared_bytes = SegmentLayout(identity.world_size, config).num_bytes()},
                    timeout) {
    rendezvous_.find_ranks();
  }
  Rendezvous& rendezvous() { return rendezvous_; }

 private:
  Rendezvous rendezvous_;
};

}  // namespace

Group::Group(KeyValueStore& store, const GroupIdentity& identity, const SegmentConfig& config,
             std::chrono::milliseconds timeout)
    : Group(OneHost(store, identity, config, timeout).rendezvous(), identity, config) {}

Group::Group(Rendezvous& rendezvous, const GroupIdentity& identity, const SegmentConfig& config)
    : rank_(identity.rank),
      world_size_(identity.world_size),
      layout_(identity.world_size, config),
      host_(host_name()) {
  Rendezvous::Meeting meeting = rendezvous.share_memory();
  memory_ = std::move(meeting.memory);
  processes_ = std::move(meeting.processes);
}

Group::~Group() {
  if (is_inherited()) return;
  __atomic_store_n(&layout_.control(memory_.data(), rank_).has_left, 1U, __ATOMIC_RELEASE);
}

pid_t Group::pid_of(int rank) const {
  const auto& process = processes_[static_cast<std::size_t>(rank)];
  return process != nullptr ? process->pid : ::getpid();
}

Stop Group::state_of(int peer) const {
  const AbortRecord& record = layout_.header(memory_.data()).abort;
  if (__atomic_load_n(&record.state, __ATOMIC_ACQUIRE) == AbortRecord::kWritten)
    return Stop::kAborted;
  if (peer == rank_) return Stop::kNone;
  if (__atomic_load_n(&layout_.control(memory_.data(), peer).has_left, __ATOMIC_ACQUIRE) != 0)
    return Stop::kPeerLeft;
  if (processes_[static_cast<std::size_t>(peer)]->is_dead.load(std::memory_order_acquire))
    return Stop::kPeerDied;
  return Stop::kNone;
}

void Group::abort(const AbortReason& reason) {
  AbortRecord& record = layout_.header(memory_.data()).abort;
  std::uint32_t expected = AbortRecord::kNone;
  if (!__atomic_compare_exchange_n(&record.state, &expected, AbortRecord::kBeingWritten, false,
                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return;
  record.kind = static_cast<std::uint32_t>(reason.kind);
  record.origin = reason.origin;
  record.culprit = reason.culprit;
  const std::size_t num_chars = std::min(reason.text.size(), sizeof(record.text) - 1);
  std::memcpy(record.text, reason.text.data(), num_chars);
  record.text[num_chars] = '\0';
  __atomic_store_n(&record.state, AbortRecord::kWritten, __ATOMIC_RELEASE);
}

AbortReason Group::abort_reason() const {
  const AbortRecord& record = layout_.header(memory_.data()).abort;
  return {.kind = static_cast<ErrorKind>(record.kind),
          .origin = record.origin,
          .culprit = record.culprit,
          .text = record.text};
}

Stop WaitScope::stopped(int peer) {
  awaited_peer_ = peer;
  if (const Stop stop = group_.state_of(peer); stop != Stop::kNone) return stop;
  if (!has_waited_) {
    has_waited_ = true;
    deadline_ = deadline_after(limits_->timeout);
    next_look_ = Clock::now() + kLookInterval;
    return Stop::kNone;
  }
  const Clock::time_point now = Clock::now();
  if (now >= deadline_) return Stop::kTimeout;
  if (!limits_->is_interrupted || now < next_look_) return Stop::kNone;
  next_look_ = now + kLookInterval;
  return limits_->is_interrupted() ? Stop::kInterrupted : Stop::kNone;
}

}  // namespace ringcomm::shm
