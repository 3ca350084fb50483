#include "transport/shm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/errors.h"
#include "transport/backoff.h"
#include "transport/wait_limits.h"

namespace ringcomm::shm {
namespace {

// How long a record that does not fit may be that of an earlier group.
constexpr std::chrono::milliseconds kStaleGrace{1000};

std::string rank_key(int rank) { return "ringcomm/rank/" + std::to_string(rank); }

}  // namespace

Rendezvous::Rendezvous(KeyValueStore& store, const GroupIdentity& identity, const Terms& terms,
                       std::chrono::milliseconds timeout)
    : store_(store),
      rank_(identity.rank),
      world_size_(identity.world_size),
      has_died_elsewhere_(identity.has_died),
      terms_(terms),
      timeout_(timeout),
      deadline_(deadline_after(timeout)),
      hub_(ProcessHub::instance()),
      mine_{.host_id = identity.host_id.empty() ? host_id() : identity.host_id,
            .host = host_name(),
            .hub_address = hub_.address(),
            .pid = ::getpid(),
            .memory_key = {},
            .options = identity.options} {}

Rendezvous::~Rendezvous() {
  if (!mine_.memory_key.empty()) hub_.withdraw(mine_.memory_key);
}

Roster Rendezvous::find_ranks() {
  // Before it is known whether all are on one host: those who are do not wait for it then.
  if (rank_ == 0 && terms_.shared_bytes > 0) offer_memory();
  const auto world = static_cast<std::size_t>(world_size_);
  texts_.resize(world);
  meeting_.processes.resize(world);
  texts_[static_cast<std::size_t>(rank_)] = mine_.to_text();
  store_.set(rank_key(rank_), mine_.to_text());
  std::deque<int> missing;
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_) missing.push_back(peer);
  for (Backoff backoff; !missing.empty();) {
    const int peer = missing.front();
    missing.pop_front();
    if (meet(peer)) {
      backoff.reset();
      continue;
    }
    missing.push_back(peer);
    look_while_missing(missing);
    backoff.sleep();
  }
  std::vector<RankRecord> records;
  for (const std::string& text : texts_) records.push_back(RankRecord::from_text(text));
  return Roster(std::move(records));
}

Rendezvous::Meeting Rendezvous::share_memory() {
  if (rank_ != 0) meeting_.memory = fetch_memory();
  return std::move(meeting_);
}

void Rendezvous::offer_memory() {
  static std::atomic<int> num_offers = 0;
  UniqueFd fd = create_memfd(terms_.shared_bytes);
  meeting_.memory = SharedMemory(fd.get(), terms_.shared_bytes);
  mine_.memory_key = hub_.address() + "/" + std::to_string(num_offers++);
  if (world_size_ > 1) hub_.offer(mine_.memory_key, std::move(fd));
}

SharedMemory Rendezvous::fetch_memory() {
  const auto look = [this] {
    if (has_died(0)) throw_died(0);
    check_time(0, "rank 0 did not hand over the group's memory");
  };
  for (Backoff backoff;; backoff.sleep()) {
    if (!meet(0)) {  // it had died, and has a new record that is doubtful
      check_time(0, "rank 0 did not hand over the group's memory");
      continue;
    }
    const RankRecord record = RankRecord::from_text(texts_[0]);
    const UniqueFd fd = hub_.fetch(record.hub_address, record.memory_key, timeout_, look);
    if (fd) {
      check_sealed(fd.get());
      if (size_of_memfd(fd.get()) != terms_.shared_bytes)
        throw Error({.kind = ErrorKind::kMismatch, .rank = 0, .op = "init"},
                    "ringcomm: the group's shared memory has another size than this rank expects");
      return SharedMemory(fd.get(), terms_.shared_bytes);
    }
    look();
    // The record of an earlier group, which rank 0 is about to replace; or rank 0 has given up, for
    // a rank that died.
    for (int peer = 1; peer < world_size_; ++peer)
      if (has_died(peer)) throw_died(peer);
  }
}

// Reads the record of `peer` if it is there. False when it is not, or does not fit yet.
bool Rendezvous::meet(int peer) {
  std::string text;
  if (!store_.try_get(rank_key(peer), text)) return false;
  std::string& believed = texts_[static_cast<std::size_t>(peer)];
  if (text == believed) return true;
  const auto doubted_since = doubts_.try_emplace(peer, Clock::now()).first->second;
  const bool is_believed = Clock::now() >= std::min(deadline_, doubted_since + kStaleGrace);
  try {
    const RankRecord theirs = RankRecord::from_text(text);
    check_compatible(theirs, peer);
    if (theirs.host_id == mine_.host_id && terms_.shared_bytes > 0) {
      std::shared_ptr<PeerProcess> process = hub_.watch(theirs.hub_address);
      if (process == nullptr && !is_believed && !is_known_dead(peer)) return false;
      if (process == nullptr) {  // it had ended before this rank could watch it
        process = std::make_shared<PeerProcess>();
        process->pid = theirs.pid;
        process->is_dead = true;
      }
      meeting_.processes[static_cast<std::size_t>(peer)] = std::move(process);
    }
  } catch (const Error&) {
    if (is_believed) throw;
    return false;
  }
  believed = text;
  doubts_.erase(peer);
  return true;
}

// Whether a rank that was met has ended, and no other process has taken its place.
bool Rendezvous::has_died(int peer) {
  const auto is_dead = [&] {
    const auto& process = meeting_.processes[static_cast<std::size_t>(peer)];
    return process != nullptr && process->is_dead.load(std::memory_order_acquire);
  };
  return is_dead() && meet(peer) && is_dead();
}

void Rendezvous::look_while_missing(std::deque<int>& missing) {
  int dead = -1;
  for (int peer = 0; peer < world_size_ && dead < 0; ++peer) {
    const bool is_met = !texts_[static_cast<std::size_t>(peer)].empty();
    if (is_met ? has_died(peer) : is_known_dead(peer)) dead = peer;
  }
  if (dead >= 0) {
    // With records that have come meanwhile all may be there, and the dead rank have joined.
    std::erase_if(missing, [this](int peer) { return meet(peer); });
    if (!missing.empty()) throw_died(dead);
    return;
  }
  const int absent = *std::min_element(missing.begin(), missing.end());
  check_time(absent, "rank " + std::to_string(absent) + " did not join the group");
}

bool Rendezvous::is_known_dead(int peer) const {
  return has_died_elsewhere_ && has_died_elsewhere_(peer);
}

void Rendezvous::check_compatible(const RankRecord& theirs, int peer) const {
  const std::string ranks = "rank " + std::to_string(rank_) + " and rank " + std::to_string(peer);
  ErrorInfo info{.rank = peer, .pid = theirs.pid, .host = theirs.host, .op = "init"};
  if (terms_.is_one_host && mine_.host_id != theirs.host_id) {
    info.kind = ErrorKind::kSystem;
    throw Error(
        info, "ringcomm: " + ranks + " share no memory: host " + mine_.host + " [" + mine_.host_id +
                  "] and host " + theirs.host + " [" + theirs.host_id +
                  "]; the shm transport wants all ranks of a group on one host and in one network "
                  "namespace; with transport=None other hosts are reached over messages");
  }
  if (mine_.options != theirs.options) {
    info.kind = ErrorKind::kMismatch;
    throw Error(info, "ringcomm: " + ranks + " made the group with different options: {" +
                          mine_.options + "} and {" + theirs.options + "}");
  }
}

void Rendezvous::check_time(int peer, const std::string& what) const {
  const std::string prefix =
      "ringcomm rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) + ": ";
  if (store_.is_interrupted())
    throw Error({.kind = ErrorKind::kInterrupted, .rank = rank_, .op = "init"},
                prefix + "interrupted by a signal while the group was made");
  if (Clock::now() < deadline_) return;
  throw Error({.kind = ErrorKind::kTimeout, .rank = peer, .op = "init"},
              prefix + what + " in " + std::to_string(timeout_.count()) +
                  " ms; read its error, or raise the timeout of init_process_group");
}

void Rendezvous::throw_died(int peer) const {
  ErrorInfo info{.kind = ErrorKind::kPeerDied, .rank = peer, .op = "init"};
  std::string name = "rank " + std::to_string(peer);
  if (const std::string& text = texts_[static_cast<std::size_t>(peer)]; !text.empty()) {
    const RankRecord theirs = RankRecord::from_text(text);
    info.pid = theirs.pid;
    info.host = theirs.host;
    name += " (pid " + std::to_string(theirs.pid) + " on " + theirs.host + ")";
  }
  throw Error(info, "ringcomm rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) +
                        ": " + name + " died while the group was made");
}

}  // namespace ringcomm::shm
