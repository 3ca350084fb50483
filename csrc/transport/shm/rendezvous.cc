#include "transport/shm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "transport/backoff.h"
#include "transport/wait_limits.h"

namespace ringcomm::shm {
namespace {

// How long a record that does not fit may be that of an earlier group.
constexpr std::chrono::milliseconds kStaleGrace{1000};

std::string rank_key(int rank) { return "ringcomm/rank/" + std::to_string(rank); }
// Where `rank` says that it reads the record of `peer` and cannot connect to it.
std::string apart_key(int rank, int peer) {
  return "ringcomm/apart/" + std::to_string(rank) + "/" + std::to_string(peer);
}
std::string memory_key(int rank) { return "ringcomm/memory/" + std::to_string(rank); }

// "rank 1", "ranks 1 and 2", "ranks 1, 2 and 3"
std::string listed(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 < ranks.size() ? ", " : " and ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

bool has_died(const PeerProcesses& processes, int rank) {
  const auto& process = processes[static_cast<std::size_t>(rank)];
  return process != nullptr && process->is_dead.load(std::memory_order_acquire);
}

bool has_exited(const PeerProcesses& processes, int rank) {
  const auto& process = processes[static_cast<std::size_t>(rank)];
  return process != nullptr && process->has_exited.load();
}

bool is_pid_hidden(const PeerProcesses& processes, int rank) {
  const auto& process = processes[static_cast<std::size_t>(rank)];
  return process != nullptr && process->is_pid_hidden;
}

bool is_stopped(const PeerProcesses& processes, int rank) {
  const auto& process = processes[static_cast<std::size_t>(rank)];
  return process != nullptr && process->is_stopped();
}

std::string last_words_of(const PeerProcesses& processes, int rank) {
  const auto& process = processes[static_cast<std::size_t>(rank)];
  return process != nullptr ? process->last_words() : std::string();
}

Rendezvous::Rendezvous(KeyValueStore& store, const GroupIdentity& identity, const Terms& terms,
                       std::chrono::milliseconds timeout)
    : store_(store),
      rank_(identity.rank),
      world_size_(identity.world_size),
      known_(identity.known),
      terms_(terms),
      timeout_(timeout),
      deadline_(deadline_after(timeout)),
      bootstrap_(Bootstrap::instance()),
      mine_{.host_id = identity.host_id.empty() ? host_id() : identity.host_id,
            .host = host_name(),
            .bootstrap_address = bootstrap_.address(),
            .pid = ::getpid(),
            .memory_key = {},
            .options = identity.options,
            .machine_id = machine_id(),
            .world_size = identity.world_size} {}

Rendezvous::~Rendezvous() {
  if (!mine_.memory_key.empty()) bootstrap_.withdraw(mine_.memory_key);
}

void Rendezvous::tell(const Error& error) {
  // After a signal the store, which may be Python's, must not be called.
  if (error.info().kind == ErrorKind::kInterrupted) return;
  try {
    std::string record;
    // Another process of this rank may have replaced it.
    if (!store_.try_get(rank_key(rank_), record) || record != mine_.to_text()) return;
    mine_.failure = {.kind = error.info().kind,
                     .origin = rank_,
                     .culprit = error.info().rank,
                     .text = error.what()};
    store_.set(rank_key(rank_), mine_.to_text());
  } catch (const std::exception&) {
    // The store is lost, and the others notice it themselves.
  }
}

PeerTable Rendezvous::find_ranks() {
  try {
    return find_all();
  } catch (const Error& error) {
    tell(error);
    throw;
  }
}

PeerTable Rendezvous::find_all() {
  // Offered before it is known whether all ranks are on one host, so that they need not wait for
  // it.
  if (rank_ == 0 && terms_.shared_bytes > 0) offer_memory(terms_.shared_bytes);
  const auto world = static_cast<std::size_t>(world_size_);
  texts_.resize(world);
  processes_.resize(world);
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
  return PeerTable(std::move(records));
}

Rendezvous::Meeting Rendezvous::share_memory(const std::vector<int>& ranks, std::size_t num_bytes) {
  const bool is_whole = static_cast<int>(ranks.size()) == world_size_;
  if (!is_whole) sharing_ = ranks;
  if (rank_ != ranks.front()) {
    try {
      memory_ = fetch_memory(ranks, num_bytes);
    } catch (const Error& error) {
      tell(error);
      throw;
    }
  } else if (!is_whole) {
    offer_memory(num_bytes);
    store_.set(memory_key(rank_), mine_.memory_key);
  }
  Meeting meeting{.memory = std::move(memory_), .processes = {}};
  for (const int rank : ranks)
    meeting.processes.push_back(processes_[static_cast<std::size_t>(rank)]);
  return meeting;
}

void Rendezvous::offer_memory(std::size_t num_bytes) {
  static std::atomic<int> num_offers = 0;
  if (!mine_.memory_key.empty()) bootstrap_.withdraw(mine_.memory_key);
  UniqueFd fd = create_memfd(num_bytes);
  memory_ = SharedMemory(fd.get(), num_bytes);
  mine_.memory_key = bootstrap_.address() + "/" + std::to_string(num_offers++);
  if (world_size_ > 1) bootstrap_.offer(mine_.memory_key, std::move(fd));
}

// The key of the memory that `leader` offers; empty if it has not published one. The key of memory
// for all ranks is in the record, because rank 0 offers it before it knows whether all are on one
// host.
std::string Rendezvous::memory_key_of(int leader, bool is_whole) {
  if (is_whole) return RankRecord::from_text(texts_[static_cast<std::size_t>(leader)]).memory_key;
  std::string key;
  store_.try_get(memory_key(leader), key);
  return key;
}

SharedMemory Rendezvous::fetch_memory(const std::vector<int>& ranks, std::size_t num_bytes) {
  const int leader = ranks.front();
  const bool is_whole = static_cast<int>(ranks.size()) == world_size_;
  const std::string what =
      "rank " + std::to_string(leader) + " did not hand over the group's memory";
  const auto look = [&] {
    if (has_died(leader)) throw_died(leader);
    check_time(leader, what);
  };
  for (Backoff backoff;; backoff.sleep()) {
    if (!meet(leader)) {  // it had died, and its new record is not confirmed yet
      check_time(leader, what);
      continue;
    }
    const RankRecord record = RankRecord::from_text(texts_[static_cast<std::size_t>(leader)]);
    const std::string key = memory_key_of(leader, is_whole);
    const UniqueFd fd =
        key.empty() ? UniqueFd() : bootstrap_.fetch(record.bootstrap_address, key, timeout_, look);
    if (fd) {
      check_sealed(fd.get());
      if (size_of_memfd(fd.get()) != num_bytes)
        throw Error(
            {.kind = ErrorKind::kMismatch, .rank = leader, .op = "init"},
            "ringcomm: the group's shared memory does not have the size that this rank expects");
      return SharedMemory(fd.get(), num_bytes);
    }
    look();
    // Either the record belongs to an earlier group and the leader is about to replace it, or the
    // leader has failed because a rank died.
    if (const int dead = dead_rank(); dead >= 0) throw_died(dead);
  }
}

std::string Rendezvous::wait_for(const std::string& key, int peer) {
  std::string value;
  for (Backoff backoff;; backoff.sleep()) {
    const int dead = dead_rank();  // before the last look at what it may have set
    if (store_.try_get(key, value)) return value;
    if (dead >= 0) throw_died(dead);
    check_time(peer, "rank " + std::to_string(peer) + " did not join the group");
  }
}

void Rendezvous::look(int peer, const std::string& what) {
  if (const int dead = dead_rank(); dead >= 0) throw_died(dead);
  check_time(peer, what);
}

// A rank that was found and has ended; -1 if there is none.
int Rendezvous::dead_rank() {
  for (int peer = 0; peer < world_size_; ++peer)
    if (has_died(peer)) return peer;
  return -1;
}

// Whether abstract sockets reach the peer. They must if the user declares that memory is shared.
bool Rendezvous::can_watch(const RankRecord& theirs) const {
  return theirs.machine_id == mine_.machine_id ||
         (terms_.shared_bytes > 0 && theirs.host_id == mine_.host_id);
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
    if (!theirs.failure.text.empty() && has_met(peer) &&
        RankRecord::from_text(believed).bootstrap_address == theirs.bootstrap_address) {
      believed = text;  // the same process, which has failed since
      return true;
    }
    if (can_watch(theirs)) {
      std::shared_ptr<PeerProcess> process = bootstrap_.watch(theirs.bootstrap_address, theirs.pid);
      if (process == nullptr) store_.set(apart_key(rank_, peer), theirs.bootstrap_address);
      if (process == nullptr && is_elsewhere(peer)) {
        check_not_cloned(theirs, peer);
      } else if (process == nullptr) {  // it had ended before this rank could watch it
        if (!is_believed && !is_known_dead(peer)) return false;
        process = std::make_shared<PeerProcess>();
        process->pid = theirs.pid;
        process->is_dead = true;
      }
      processes_[static_cast<std::size_t>(peer)] = std::move(process);
    }
  } catch (const Error&) {
    if (is_believed) throw;
    return false;
  }
  believed = text;
  doubts_.erase(peer);
  return true;
}

// Whether a rank that was found has ended, and no other process has replaced it.
bool Rendezvous::has_died(int peer) {
  const auto is_dead = [&] { return shm::has_died(processes_, peer); };
  return is_dead() && meet(peer) && is_dead();
}

// Whether `peer` lives where this rank's sockets do not reach, whatever their machines' names: it
// has read this rank's address, which is random, and cannot connect to it either.
bool Rendezvous::is_elsewhere(int peer) {
  std::string unreachable;
  return store_.try_get(apart_key(peer, rank_), unreachable) &&
         unreachable == mine_.bootstrap_address;
}

void Rendezvous::check_not_cloned(const RankRecord& theirs, int peer) const {
  if (theirs.host_id != mine_.host_id) return;
  throw Error({.kind = ErrorKind::kSystem, .rank = peer, .host = theirs.host, .op = "init"},
              prefix() + "rank " + std::to_string(peer) + " (on " + theirs.host +
                  ") has the host identity of this rank (on " + mine_.host + "), " + mine_.host_id +
                  ", but is on another machine, as after a start from copies of one "
                  "memory image; set RINGCOMM_HOST_ID to another value on each machine");
}

void Rendezvous::look_while_missing(std::deque<int>& missing) {
  int dead = -1;
  for (int peer = 0; peer < world_size_ && dead < 0; ++peer) {
    if (has_met(peer) ? has_died(peer) : is_known_dead(peer)) dead = peer;
  }
  if (dead >= 0) {
    // Records that have arrived meanwhile may complete the group, and the dead rank may have
    // joined.
    std::erase_if(missing, [this](int peer) { return meet(peer); });
    if (!missing.empty()) throw_died(dead);
    return;
  }
  // Those that have arrived since the last look at each are not missing.
  if (Clock::now() >= deadline_) std::erase_if(missing, [this](int peer) { return meet(peer); });
  if (missing.empty()) return;
  check_time(*std::min_element(missing.begin(), missing.end()),
             listed({missing.begin(), missing.end()}) + " did not join the group");
}

bool Rendezvous::is_known_dead(int peer) const { return known_.has_died && known_.has_died(peer); }

// A rank that is stopped before it has a record is known from another group alone.
bool Rendezvous::is_stopped(int peer) const {
  return shm::is_stopped(processes_, peer) || (known_.is_stopped && known_.is_stopped(peer));
}

void Rendezvous::check_compatible(const RankRecord& theirs, int peer) const {
  const std::string ranks = "rank " + std::to_string(rank_) + " and rank " + std::to_string(peer);
  ErrorInfo info{.rank = peer, .pid = theirs.pid, .host = theirs.host, .op = "init"};
  if (terms_.is_one_host && mine_.host_id != theirs.host_id) {
    info.kind = ErrorKind::kSystem;
    throw Error(
        info, "ringcomm: " + ranks + " share no memory: host " + mine_.host + " [" + mine_.host_id +
                  "] and host " + theirs.host + " [" + theirs.host_id +
                  "]; the shm transport needs all ranks of a group on one host and in one network "
                  "namespace; transport=None also supports several hosts, over messages");
  }
  if (mine_.world_size != theirs.world_size) {
    info.kind = ErrorKind::kMismatch;
    throw Error(info, "ringcomm: " + ranks +
                          " made a group of different sizes: " + std::to_string(mine_.world_size) +
                          " and " + std::to_string(theirs.world_size) +
                          " ranks; start all ranks with the same world size");
  }
  if (mine_.options != theirs.options) {
    info.kind = ErrorKind::kMismatch;
    throw Error(info, "ringcomm: " + ranks + " made the group with different options: {" +
                          mine_.options + "} and {" + theirs.options + "}");
  }
}

void Rendezvous::check_time(int peer, const std::string& what) {
  if (store_.is_interrupted())
    throw Error({.kind = ErrorKind::kInterrupted, .rank = rank_, .op = "init"},
                prefix() + "interrupted by a signal while the group was made");
  // Ranks of one host may share their memory while one of another host cannot join any more.
  if (!sharing_.empty())
    for (int other = 0; other < world_size_; ++other)
      if (std::find(sharing_.begin(), sharing_.end(), other) == sharing_.end() && has_died(other))
        throw_died(other);
  if (Clock::now() < deadline_) return;
  const std::string after = prefix() + what + " in " + std::to_string(timeout_.count()) + " ms";
  // The rank waited for may itself wait for that one, in another group.
  for (int stopped = 0; stopped < world_size_; ++stopped)
    if (is_stopped(stopped))
      throw Error(info_of(stopped, ErrorKind::kTimeout),
                  after + ", and the process of " + name_of(stopped) + " is stopped");
  if (std::string record; store_.try_get(rank_key(rank_), record) && record != mine_.to_text())
    throw Error(info_of(peer, ErrorKind::kTimeout),
                after + "; another process joined as rank " + std::to_string(rank_) +
                    " too: give each process a rank of its own");
  throw Error(info_of(peer, ErrorKind::kTimeout),
              after + "; start " + std::to_string(world_size_) +
                  " ranks, read that rank's error, or raise the timeout of init_process_group");
}

void Rendezvous::throw_died(int peer) const {
  if (has_met(peer)) {
    const RankRecord theirs = RankRecord::from_text(texts_[static_cast<std::size_t>(peer)]);
    if (!theirs.failure.text.empty()) throw_told(theirs.failure);
  }
  const std::string words = last_words_of(processes_, peer);
  const bool has_exited = words.empty() && shm::has_exited(processes_, peer);
  throw Error(info_of(peer, ErrorKind::kPeerDied),
              prefix() + name_of(peer) + (has_exited ? " has exited" : " died") +
                  " while the group was made" + why_it_ended(words));
}

void Rendezvous::throw_told(const AbortReason& reason) const {
  const auto checked = [this](int rank) { return rank < world_size_ ? rank : -1; };
  throw Error(info_of(checked(reason.culprit), reason.kind),
              prefix() + name_of(checked(reason.origin)) + " failed: " + reason.text);
}

ErrorInfo Rendezvous::info_of(int peer, ErrorKind kind) const {
  ErrorInfo info{.kind = kind, .rank = peer, .op = "init"};
  if (peer < 0) return info;
  const std::string& text = texts_[static_cast<std::size_t>(peer)];
  if (text.empty()) return info;
  const RankRecord theirs = RankRecord::from_text(text);
  const auto& process = processes_[static_cast<std::size_t>(peer)];
  info.pid = process != nullptr ? process->pid : theirs.pid;
  info.host = theirs.host;
  return info;
}

std::string Rendezvous::name_of(int peer) const {
  const ErrorInfo info = info_of(peer, {});
  if (info.pid < 0) return "rank " + std::to_string(peer);
  return name_of_process(peer, info.pid, is_pid_hidden(processes_, peer), info.host);
}

std::string Rendezvous::prefix() const {
  return "ringcomm rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) + ": ";
}

}  // namespace ringcomm::shm
