#include "transport/shm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

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

// At which a bootstrap offers the memory of a group for so many ranks. Rank 0 may offer it for all,
// and then for those of its host.
std::string memory_key(const RankRecord& leader, std::size_t num_ranks) {
  return leader.memory_key + "/" + std::to_string(num_ranks);
}

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

std::shared_ptr<PeerProcess> new_process(pid_t pid) {
  auto process = std::make_shared<PeerProcess>();
  process->pid = pid;
  return process;
}

// Unlike all keys of earlier groups.
std::string new_memory_key(const Bootstrap& bootstrap) {
  static std::atomic<int> num_keys = 0;
  return bootstrap.address() + "/" + std::to_string(num_keys++);
}

}  // namespace

Rendezvous::Rendezvous(KeyValueStore& store, const GroupTerms& terms,
                       std::chrono::milliseconds timeout)
    : store_(store),
      terms_(terms),
      timeout_(timeout),
      deadline_(deadline_after(timeout)),
      bootstrap_(Bootstrap::instance()),
      mine_{.host_id = terms.host_id.empty() ? host_id() : terms.host_id,
            .host = host_name(),
            .bootstrap_address = bootstrap_.address(),
            .pid = ::getpid(),
            .memory_key = new_memory_key(bootstrap_),
            .options = terms.options,
            .machine_id = machine_id(),
            .world_size = terms.world_size},
      peers_(static_cast<std::size_t>(terms.world_size)) {
  for (int peer = 0; peer < world_size(); ++peer)
    processes_.push_back(new_process(peer == rank() ? mine_.pid : -1));
}

Rendezvous::~Rendezvous() { bootstrap_.withdraw(offer_key_); }

// Whether another process of this rank has replaced its record.
bool Rendezvous::is_replaced() {
  std::string record;
  return store_.try_get(rank_key(rank()), record) && record != mine_.to_text();
}

void Rendezvous::tell(const Error& error) {
  // After a signal the store, which may be Python's, must not be called.
  if (error.info().kind == ErrorKind::kInterrupted) return;
  try {
    if (is_replaced()) return;
    mine_.failure = {.kind = error.info().kind,
                     .origin = rank(),
                     .culprit = error.info().rank,
                     .text = error.what()};
    store_.set(rank_key(rank()), mine_.to_text());
  } catch (const std::exception&) {
    // The store is lost, and the others notice it themselves.
  }
}

template <class Action>
auto Rendezvous::tell_if_it_fails(const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    tell(error);
    throw;
  }
}

PeerTable Rendezvous::find_ranks() {
  return tell_if_it_fails([this] {
    // Offered before it is known whether all ranks are on one host, so that they need not wait for
    // it.
    if (rank() == 0 && terms_.shared_bytes > 0) offer_memory(peers_.size(), terms_.shared_bytes);
    peers_[static_cast<std::size_t>(rank())] = {.text = mine_.to_text(), .record = mine_};
    store_.set(rank_key(rank()), mine_.to_text());
    std::deque<int> missing;
    for (int peer = 0; peer < world_size(); ++peer)
      if (peer != rank()) missing.push_back(peer);
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
    for (const Peer& peer : peers_) records.push_back(peer.record);
    return PeerTable(std::move(records));
  });
}

SharedMemory Rendezvous::share_memory(const std::vector<int>& ranks, std::size_t num_bytes) {
  sharing_ = ranks;
  return tell_if_it_fails([&] {
    if (rank() != ranks.front()) return fetch_memory(ranks, num_bytes);
    if (offer_key_ != memory_key(mine_, ranks.size())) offer_memory(ranks.size(), num_bytes);
    return std::move(memory_);
  });
}

void Rendezvous::offer_memory(std::size_t num_ranks, std::size_t num_bytes) {
  bootstrap_.withdraw(offer_key_);
  UniqueFd fd = create_memfd(num_bytes);
  memory_ = SharedMemory(fd.get(), num_bytes);
  offer_key_ = memory_key(mine_, num_ranks);
  if (num_ranks > 1) bootstrap_.offer(offer_key_, std::move(fd));
}

SharedMemory Rendezvous::fetch_memory(const std::vector<int>& ranks, std::size_t num_bytes) {
  const int leader = ranks.front();
  const std::string what =
      "rank " + std::to_string(leader) + " did not hand over the group's memory";
  const auto look_at_leader = [&] {
    if (has_died(leader)) throw_died(leader);
    check_time(leader, what);
  };
  for (Backoff backoff;; backoff.sleep()) {
    if (!meet(leader)) {  // it had died, and its new record is not confirmed yet
      check_time(leader, what);
      continue;
    }
    const RankRecord record = peer_of(leader).record;  // which look_at_leader() may replace
    const UniqueFd fd = bootstrap_.fetch(record.bootstrap_address, memory_key(record, ranks.size()),
                                         timeout_, look_at_leader);
    if (fd) {
      check_sealed(fd.get());
      if (size_of_memfd(fd.get()) != num_bytes)
        throw Error(
            {.kind = ErrorKind::kMismatch, .rank = leader, .op = "init"},
            "ringcomm: the group's shared memory does not have the size that this rank expects");
      return SharedMemory(fd.get(), num_bytes);
    }
    look_at_leader();
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

// Whether a rank that was found has ended, and no other process has replaced it.
bool Rendezvous::has_died(int peer) {
  return process_of(peer).is_dead && meet(peer) && process_of(peer).is_dead;
}

// A rank that has ended, from another group where it has no record yet; -1 if there is none.
int Rendezvous::dead_rank() {
  for (int peer = 0; peer < world_size(); ++peer)
    if (has_met(peer) ? has_died(peer) : terms_.known.has_died && terms_.known.has_died(peer))
      return peer;
  return -1;
}

void Rendezvous::look_while_missing(std::deque<int>& missing) {
  const int dead = dead_rank();
  // Records that have arrived meanwhile may complete the group, and the dead rank may have joined.
  if (dead >= 0 || Clock::now() >= deadline_)
    std::erase_if(missing, [this](int peer) { return meet(peer); });
  if (missing.empty()) return;
  if (dead >= 0) throw_died(dead);
  check_time(*std::min_element(missing.begin(), missing.end()),
             listed({missing.begin(), missing.end()}) + " did not join the group");
}

// Reads the record of `peer` if it is there. False when it is not, or does not fit yet.
bool Rendezvous::meet(int peer) {
  std::string text;
  if (!store_.try_get(rank_key(peer), text)) return false;
  Peer& known = peers_[static_cast<std::size_t>(peer)];
  if (text == known.text) return true;
  if (!known.doubted_since) known.doubted_since = Clock::now();
  const bool is_believed = Clock::now() >= std::min(deadline_, *known.doubted_since + kStaleGrace);
  try {
    RankRecord theirs = RankRecord::from_text(text);
    check_compatible(theirs, peer);
    // The same process may have failed since.
    if (theirs.failure.text.empty() || !has_met(peer) ||
        theirs.bootstrap_address != known.record.bootstrap_address) {
      auto process = find_process(theirs, peer, is_believed);
      if (process == nullptr) return false;
      processes_[static_cast<std::size_t>(peer)] = std::move(process);
    }
    known = {.text = std::move(text), .record = std::move(theirs)};
    return true;
  } catch (const Error&) {
    if (is_believed) throw;
    return false;
  }
}

// Watches the process of a record, if it is on this machine. Null if it had ended before, and its
// record is not believed.
std::shared_ptr<PeerProcess> Rendezvous::find_process(const RankRecord& theirs, int peer,
                                                      bool is_believed) {
  // Abstract sockets must reach the peer also if the user declares that memory is shared.
  const bool can_watch = theirs.machine_id == mine_.machine_id ||
                         (terms_.shared_bytes > 0 && theirs.host_id == mine_.host_id);
  if (can_watch)
    if (auto process = bootstrap_.watch(theirs.bootstrap_address, theirs.pid)) return process;
  auto process = new_process(theirs.pid);
  if (!can_watch) return process;

  store_.set(apart_key(rank(), peer), theirs.bootstrap_address);
  // Where the peer has read this rank's address, which is random, and cannot connect to it either,
  // sockets do not reach it, whatever the machines' names.
  std::string unreachable;
  if (store_.try_get(apart_key(peer, rank()), unreachable) &&
      unreachable == mine_.bootstrap_address) {
    if (theirs.host_id != mine_.host_id) return process;
    throw Error({.kind = ErrorKind::kSystem, .rank = peer, .host = theirs.host, .op = "init"},
                prefix() + "rank " + std::to_string(peer) + " (on " + theirs.host +
                    ") has the host identity of this rank (on " + mine_.host + "), " +
                    mine_.host_id +
                    ", but is on another machine, as after a start from copies of one "
                    "memory image; set RINGCOMM_HOST_ID to another value on each machine");
  }
  if (!is_believed && !(terms_.known.has_died && terms_.known.has_died(peer))) return nullptr;
  process->is_dead = true;
  return process;
}

void Rendezvous::check_compatible(const RankRecord& theirs, int peer) const {
  const std::string ranks = "rank " + std::to_string(rank()) + " and rank " + std::to_string(peer);
  const auto fail = [&](ErrorKind kind, const std::string& text) {
    throw Error({.kind = kind, .rank = peer, .pid = theirs.pid, .host = theirs.host, .op = "init"},
                "ringcomm: " + ranks + text);
  };
  if (terms_.is_one_host && mine_.host_id != theirs.host_id)
    fail(ErrorKind::kSystem,
         " share no memory: host " + mine_.host + " [" + mine_.host_id + "] and host " +
             theirs.host + " [" + theirs.host_id +
             "]; the shm transport needs all ranks of a group on one host and in one network "
             "namespace; transport=None also supports several hosts, over messages");
  if (mine_.world_size != theirs.world_size)
    fail(ErrorKind::kMismatch,
         " made a group of different sizes: " + std::to_string(mine_.world_size) + " and " +
             std::to_string(theirs.world_size) +
             " ranks; start all ranks with the same world size");
  if (mine_.options != theirs.options)
    fail(ErrorKind::kMismatch, " made the group with different options: {" + mine_.options +
                                   "} and {" + theirs.options + "}");
}

void Rendezvous::check_time(int peer, const std::string& what) {
  if (store_.is_interrupted())
    throw Error({.kind = ErrorKind::kInterrupted, .rank = rank(), .op = "init"},
                prefix() + "interrupted by a signal while the group was made");
  // Ranks of one host may share their memory while one of another host cannot join any more.
  for (int other = 0; !sharing_.empty() && other < world_size(); ++other)
    if (!std::binary_search(sharing_.begin(), sharing_.end(), other) && has_died(other))
      throw_died(other);
  if (Clock::now() < deadline_) return;
  const std::string after = prefix() + what + " in " + std::to_string(timeout_.count()) + " ms";
  // The rank waited for may itself wait for that one, in another group, which alone knows a rank
  // without a record.
  for (int stopped = 0; stopped < world_size(); ++stopped)
    if (process_of(stopped).is_stopped() ||
        (terms_.known.is_stopped && terms_.known.is_stopped(stopped)))
      throw Error(info_of(stopped, ErrorKind::kTimeout),
                  after + ", and the process of " + name_of(stopped) + " is stopped");
  if (is_replaced())
    throw Error(info_of(peer, ErrorKind::kTimeout),
                after + "; another process joined as rank " + std::to_string(rank()) +
                    " too: give each process a rank of its own");
  throw Error(info_of(peer, ErrorKind::kTimeout),
              after + "; start " + std::to_string(world_size()) +
                  " ranks, read that rank's error, or raise the timeout of init_process_group");
}

void Rendezvous::throw_died(int peer) const {
  if (const AbortReason& failure = peer_of(peer).record.failure; !failure.text.empty())
    throw_told(failure);
  const std::string words = process_of(peer).last_words();
  const bool has_exited = words.empty() && process_of(peer).has_exited;
  throw Error(info_of(peer, ErrorKind::kPeerDied),
              prefix() + name_of(peer) + (has_exited ? " has exited" : " died") +
                  " while the group was made" + why_it_ended(words));
}

void Rendezvous::throw_told(const AbortReason& reason) const {
  const auto checked = [this](int rank) { return rank < world_size() ? rank : -1; };
  throw Error(info_of(checked(reason.culprit), reason.kind),
              prefix() + name_of(checked(reason.origin)) + " failed: " + reason.text);
}

ErrorInfo Rendezvous::info_of(int peer, ErrorKind kind) const {
  ErrorInfo info{.kind = kind, .rank = peer, .op = "init"};
  if (peer < 0 || !has_met(peer)) return info;
  info.pid = process_of(peer).pid;
  info.host = peer_of(peer).record.host;
  return info;
}

std::string Rendezvous::name_of(int peer) const {
  if (peer < 0 || !has_met(peer)) return "rank " + std::to_string(peer);
  return name_of_process(peer, process_of(peer), peer_of(peer).record.host);
}

std::string Rendezvous::prefix() const {
  return "ringcomm rank " + std::to_string(rank()) + "/" + std::to_string(world_size()) + ": ";
}

}  // namespace ringcomm::shm
