#include "transport/shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/annotations.h"
#include "transport/backoff.h"

namespace ringcomm::shm {
namespace {

// A check for signals takes Python's GIL and may wait for another thread. So it is rare, and never
// happens in waits that end immediately.
constexpr std::chrono::milliseconds kLookInterval{50};

// How long ranks may take to fetch the memory of a group that another rank's death has ended: as
// long as they may doubt that rank's record, and some more.
constexpr std::chrono::milliseconds kFetchGrace{1500};

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

void reserve_link(const LinkGeometry& link) {
  auto* begin = reinterpret_cast<std::byte*>(link.tail);
  reserve_pages(begin,
                static_cast<std::size_t>(link.slots - begin) + link.num_slots * link.slot_bytes);
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Group::Group(KeyValueStore& store, const GroupIdentity& identity, const SegmentConfig& config,
             std::chrono::milliseconds timeout)
    : Group(OneHost(store, identity, config, timeout).rendezvous(), identity, config,
            all_ranks(identity.world_size)) {}

Group::Group(Rendezvous& rendezvous, const GroupIdentity& identity, const SegmentConfig& config,
             const std::vector<int>& ranks)
    : rank_(identity.rank),
      world_size_(identity.world_size),
      ranks_(ranks),
      layout_(identity.world_size, config),
      host_(host_name()) {
  Rendezvous::Meeting meeting = rendezvous.share_memory(ranks, layout_.num_bytes());
  memory_ = std::move(meeting.memory);
  processes_ = std::move(meeting.processes);
  __atomic_store_n(&layout_.control(memory_.data(), rank_).has_left, 0U, __ATOMIC_RELAXED);
  reserve_own_memory();
  RINGCOMM_STEP("before a rank has joined");
  __atomic_store_n(&layout_.has_joined(memory_.data(), rank_), 1U, __ATOMIC_RELEASE);
  RINGCOMM_STEP("after a rank has joined");
  wait_until_joined(rendezvous);
}

// The pages that this rank writes, but for those of messages (reserve_p2p()).
void Group::reserve_own_memory() {
  const BoardGeometry geometry = board();
  try {
    reserve_pages(memory_.data(), static_cast<std::size_t>(geometry.regions - memory_.data()));
    reserve_pages(geometry.region(rank_, 0), 2 * geometry.region_bytes);
    reserve_link(ring_link(rank_));
  } catch (const Error& error) {
    // Its peers learn of it here or in their first call, and rank 0 does not wait for this rank.
    tell_and_wait_for_the_living(error);
    __atomic_store_n(&layout_.has_joined(memory_.data(), rank_), 1U, __ATOMIC_RELEASE);
    throw;
  }
}

void Group::reserve_p2p(int to) { reserve_link(p2p_link(rank_, to)); }

bool Group::has_joined(int rank) const {
  return __atomic_load_n(&layout_.has_joined(memory_.data(), rank), __ATOMIC_ACQUIRE) != 0;
}

// -1 when all are there.
int Group::unjoined_rank() const {
  for (int rank = 0; rank < world_size_; ++rank)
    if (!has_joined(rank)) return rank;
  return -1;
}

// A rank that has not joined needs the others: rank 0 offers the memory, and of all of them it may
// still read the records and watch the processes. So no rank returns, and may end, before all have
// joined. Afterwards they need the memory alone.
void Group::wait_until_joined(Rendezvous& rendezvous) {
  try {
    for (Backoff backoff;; backoff.sleep()) {
      const bool is_aborted = state_of(rank_) == Stop::kAborted;
      const int peer = unjoined_rank();
      if (peer < 0) return;
      if (is_aborted) rendezvous.throw_told(abort_reason());
      for (int rank = peer; rank < world_size_; ++rank)
        if (has_died(rank) && !has_joined(rank)) rendezvous.throw_died(whole_rank(rank));
      rendezvous.check_time(whole_rank(peer), "rank " + std::to_string(whole_rank(peer)) +
                                                  " did not fetch the group's memory");
    }
  } catch (const Error& error) {
    rendezvous.tell(error);
    tell_and_wait_for_the_living(error);
    throw;
  }
}

// The others wait in the memory, or are about to fetch it: they find the reason in it.
void Group::tell_and_wait_for_the_living(const Error& error) {
  abort({.kind = error.info().kind,
         .origin = whole_rank(rank_),
         .culprit = error.info().rank,
         .text = error.what()});
  const ErrorKind kind = error.info().kind;
  if (rank_ != 0 || (kind != ErrorKind::kPeerDied && kind != ErrorKind::kSystem)) return;
  const auto deadline = std::chrono::steady_clock::now() + kFetchGrace;
  const auto is_to_come = [&] {
    for (int rank = 1; rank < world_size_; ++rank)
      if (!has_joined(rank) && !has_died(rank)) return true;
    return false;
  };
  for (Backoff backoff; is_to_come() && std::chrono::steady_clock::now() < deadline;)
    backoff.sleep();
}

Group::~Group() {
  if (is_inherited()) return;
  RINGCOMM_STEP("before a rank has left");
  __atomic_store_n(&layout_.control(memory_.data(), rank_).has_left, 1U, __ATOMIC_RELEASE);
}

pid_t Group::pid_of(int rank) const {
  const auto& process = processes_[static_cast<std::size_t>(rank)];
  return process != nullptr ? process->pid : ::getpid();
}

// Values read from the memory are checked, because a faulty peer may have written them.

int Group::writer_of(std::uint32_t abort_state) const {
  const std::uint32_t writer = abort_state - AbortRecord::kFirstWriter;
  const bool is_rank =
      abort_state >= AbortRecord::kFirstWriter && writer < static_cast<std::uint32_t>(world_size_);
  return is_rank ? static_cast<int>(writer) : -1;
}

Stop Group::state_of(int peer) const {
  const AbortRecord& record = layout_.header(memory_.data()).abort;
  const std::uint32_t state = __atomic_load_n(&record.state, __ATOMIC_ACQUIRE);
  if (state == AbortRecord::kWritten) return Stop::kAborted;
  if (const int writer = writer_of(state); writer >= 0 && has_died(writer)) return Stop::kAborted;
  if (peer == rank_) return Stop::kNone;
  if (__atomic_load_n(&layout_.control(memory_.data(), peer).has_left, __ATOMIC_ACQUIRE) != 0)
    return Stop::kPeerLeft;
  return has_died(peer) ? Stop::kPeerDied : Stop::kNone;
}

std::int64_t Group::num_calls_of(int rank) const {
  return static_cast<std::int64_t>(
      __atomic_load_n(&layout_.control(memory_.data(), rank).num_calls, __ATOMIC_RELAXED));
}

void Group::note_call(std::uint64_t seq) {
  __atomic_store_n(&layout_.control(memory_.data(), rank_).num_calls, seq + 1, __ATOMIC_RELAXED);
}

std::uint64_t Group::num_published(int rank) const {
  return __atomic_load_n(&layout_.control(memory_.data(), rank).published.value, __ATOMIC_ACQUIRE);
}

int Group::missing_rank() const {
  const std::uint64_t own = num_published(rank_);
  for (int rank = 0; rank < world_size_; ++rank) {
    // The state first: it was there before the end what the rank published.
    if (rank != rank_ && state_of(rank) != Stop::kNone && num_published(rank) < own) return rank;
  }
  return -1;
}

int Group::late_rank(int peer) const {
  int late = peer;
  for (int rank = 0; rank < world_size_; ++rank)
    if (num_published(rank) < std::min(num_published(rank_), num_published(late))) late = rank;
  return late;
}

bool Group::is_given_up(bool) noexcept {
  const std::uint32_t& state = layout_.header(memory_.data()).abort.state;
  return __atomic_load_n(&state, __ATOMIC_ACQUIRE) != AbortRecord::kNone;
}

void Group::abort(const AbortReason& reason) {
  AbortRecord& record = layout_.header(memory_.data()).abort;
  std::uint32_t expected = AbortRecord::kNone;
  const std::uint32_t writer = AbortRecord::kFirstWriter + static_cast<std::uint32_t>(rank_);
  if (!__atomic_compare_exchange_n(&record.state, &expected, writer, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE))
    return;
  RINGCOMM_STEP("while the reason of an abort is written");
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
  if (const int writer = writer_of(__atomic_load_n(&record.state, __ATOMIC_ACQUIRE)); writer >= 0)
    return {.kind = ErrorKind::kPeerDied,
            .origin = whole_rank(writer),
            .culprit = whole_rank(writer),
            .text = "it died before it could report why"};
  return {.kind = static_cast<ErrorKind>(record.kind),
          .origin = record.origin,
          .culprit = record.culprit,
          .text = {record.text, ::strnlen(record.text, sizeof(record.text))}};
}

Stop WaitScope::stopped(int peer) {
  awaited_peer_ = peer;
  if (const Stop stop = group_.state_of(peer); stop != Stop::kNone) return stop;
  if (const int missing = group_.missing_rank(); missing >= 0) {
    awaited_peer_ = missing;
    return group_.state_of(missing);
  }
  if (!has_waited_) {
    has_waited_ = true;
    deadline_ = deadline_after(limits_->timeout);
    next_look_ = Clock::now() + kLookInterval;
    return Stop::kNone;
  }
  const Clock::time_point now = Clock::now();
  if (now >= deadline_) {
    awaited_peer_ = group_.late_rank(peer);
    return Stop::kTimeout;
  }
  if (!limits_->is_interrupted || now < next_look_) return Stop::kNone;
  next_look_ = now + kLookInterval;
  return limits_->is_interrupted() ? Stop::kInterrupted : Stop::kNone;
}

}  // namespace ringcomm::shm
