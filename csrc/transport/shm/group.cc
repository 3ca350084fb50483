#include "transport/shm/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "transport/shm/rank_record.h"

namespace ringcomm::shm {
namespace {

constexpr std::chrono::milliseconds kFirstRetry{1};
constexpr std::chrono::milliseconds kLastRetry{50};

// Looking for signals takes Python's lock, for which another thread may make us wait: seldom, and
// never in the waits that are over at once.
constexpr std::chrono::milliseconds kLookInterval{50};

std::string rank_key(int rank) { return "ringcomm/rank/" + std::to_string(rank); }

// Takes the memory back from the hub when not every rank has come for it.
class OfferGuard {
 public:
  explicit OfferGuard(std::string key) : key_(std::move(key)) {}
  ~OfferGuard() {
    if (!key_.empty()) ProcessHub::instance().withdraw(key_);
  }
  OfferGuard(const OfferGuard&) = delete;
  OfferGuard& operator=(const OfferGuard&) = delete;
  void release() { key_.clear(); }

 private:
  std::string key_;
};

void check_compatible(const RankRecord& mine, const RankRecord& theirs, int rank, int peer) {
  const std::string ranks = "rank " + std::to_string(rank) + " and rank " + std::to_string(peer);
  if (mine.host_id != theirs.host_id)
    throw Error({.kind = ErrorKind::kSystem, .rank = peer, .pid = theirs.pid, .host = theirs.host},
                "ringcomm: " + ranks + " share no memory: host " + mine.host + " [" + mine.host_id +
                    "] and host " + theirs.host + " [" + theirs.host_id +
                    "]; the shm transport wants all ranks of a group on one host "
                    "and in one network namespace");
  if (mine.options != theirs.options)
    throw Error({.kind = ErrorKind::kMismatch,
                 .rank = peer,
                 .pid = theirs.pid,
                 .host = theirs.host,
                 .op = "init"},
                "ringcomm: " + ranks + " made the group with different options: {" + mine.options +
                    "} and {" + theirs.options + "}");
}

}  // namespace

Group::Group(KeyValueStore& store, const GroupIdentity& identity, const SegmentConfig& config,
             std::chrono::milliseconds timeout)
    : rank_(identity.rank),
      world_size_(identity.world_size),
      layout_(identity.world_size, config),
      host_(host_name()),
      hub_(&ProcessHub::instance()),
      processes_(static_cast<std::size_t>(identity.world_size)) {
  attach(store, identity, timeout);
}

void Group::attach(KeyValueStore& store, const GroupIdentity& identity,
                   std::chrono::milliseconds timeout) {
  ProcessHub& hub = *hub_;
  RankRecord mine{.host_id = host_id(),
                  .host = host_,
                  .hub_address = hub.address(),
                  .pid = ::getpid(),
                  .memory_key = {},
                  .options = identity.options};
  if (rank_ == 0) {
    UniqueFd fd = create_memfd(layout_.num_bytes());
    memory_ = SharedMemory(fd.get(), layout_.num_bytes());
    static std::atomic<int> num_offers = 0;
    mine.memory_key = hub.address() + "/" + std::to_string(num_offers++);
    if (world_size_ > 1) hub.offer(mine.memory_key, std::move(fd), world_size_ - 1);
  }
  OfferGuard offer(mine.memory_key);
  store.set(rank_key(rank_), mine.to_text());

  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    std::string text;
    if (!store.get(rank_key(peer), timeout, text))
      throw Error({.kind = ErrorKind::kTimeout, .rank = peer, .op = "init"},
                  "ringcomm rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) +
                      ": rank " + std::to_string(peer) + " did not join the group in " +
                      std::to_string(timeout.count()) +
                      " ms; read its error, or raise `timeout=` of init_process_group");
    const RankRecord theirs = RankRecord::from_text(text);
    check_compatible(mine, theirs, rank_, peer);
    processes_[static_cast<std::size_t>(peer)] = hub.watch(theirs.hub_address);
  }
  if (rank_ != 0) memory_ = fetch_memory(store, timeout);
  offer.release();  // the last rank to fetch ends the offer
}

SharedMemory Group::fetch_memory(KeyValueStore& store, std::chrono::milliseconds timeout) const {
  const auto deadline = deadline_after(timeout);
  std::string text;
  for (auto pause = kFirstRetry; std::chrono::steady_clock::now() < deadline;
       pause = std::min(2 * pause, kLastRetry)) {
    store.get(rank_key(0), timeout, text);
    const RankRecord record = RankRecord::from_text(text);
    const UniqueFd fd = hub_->fetch(record.hub_address, record.memory_key, timeout);
    if (!fd) {
      // The record may be that of an earlier group: programs destroy and make groups over the same
      // store. Rank 0 is about to replace it.
      std::this_thread::sleep_for(pause);
      continue;
    }
    if (size_of_memfd(fd.get()) != layout_.num_bytes())
      throw Error({.kind = ErrorKind::kMismatch, .rank = 0, .op = "init"},
                  "ringcomm: the group's shared memory has another size than this rank expects");
    return SharedMemory(fd.get(), layout_.num_bytes());
  }
  throw Error({.kind = ErrorKind::kTimeout, .rank = 0, .op = "init"},
              "ringcomm rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) +
                  ": rank 0 did not hand over the group's memory in " +
                  std::to_string(timeout.count()) + " ms; read its error");
}

Group::~Group() {
  if (memory_.data() == nullptr || is_inherited()) return;
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

std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using TimePoint = std::chrono::steady_clock::time_point;
  const TimePoint now = std::chrono::steady_clock::now();
  // Compared in milliseconds: the clock's nanoseconds would overflow first.
  const auto countable = std::chrono::floor<std::chrono::milliseconds>(TimePoint::max() - now);
  return timeout < countable ? now + timeout : TimePoint::max();
}

void WaitScope::begin(const WaitLimits& limits) {
  limits_ = &limits;
  deadline_ = deadline_after(limits.timeout);
  next_look_ = Clock::now() + kLookInterval;
}

Stop WaitScope::stopped(int peer) {
  if (const Stop stop = group_.state_of(peer); stop != Stop::kNone) return stop;
  const Clock::time_point now = Clock::now();
  if (now >= deadline_) return Stop::kTimeout;
  if (limits_ == nullptr || !limits_->is_interrupted || now < next_look_) return Stop::kNone;
  next_look_ = now + kLookInterval;
  return limits_->is_interrupted() ? Stop::kInterrupted : Stop::kNone;
}

}  // namespace ringcomm::shm
