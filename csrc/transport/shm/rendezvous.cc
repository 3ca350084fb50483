#include "transport/shm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "transport/wait_limits.h"

namespace ringcomm::shm {
namespace {

constexpr std::chrono::milliseconds kFirstRetry{1};
constexpr std::chrono::milliseconds kLastRetry{50};
// How long a record that does not fit may be that of an earlier group.
constexpr std::chrono::milliseconds kStaleGrace{1000};

std::string rank_key(int rank) { return "ringcomm/rank/" + std::to_string(rank); }

// Sleeps, longer each time.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(2 * pause_, kLastRetry);
  }

 private:
  std::chrono::milliseconds pause_ = kFirstRetry;
};

}  // namespace

Rendezvous::Rendezvous(KeyValueStore& store, const GroupIdentity& identity, const Terms& terms,
                       std::chrono::milliseconds timeout)
    : store_(store),
      rank_(identity.rank),
      world_size_(identity.world_size),
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
  store_.set(rank_key(rank_), mine_.to_text());
  meeting_.processes.resize(static_cast<std::size_t>(world_size_));
  std::vector<RankRecord> records;
  for (int peer = 0; peer < world_size_; ++peer)
    records.push_back(peer == rank_ ? mine_ : meet_peer(peer));
  return Roster(std::move(records));
}

Rendezvous::Meeting Rendezvous::share_memory() {
  if (rank_ != 0) {
    meeting_.memory = fetch_memory();
  } else if (!hub_.wait_until_taken(mine_.memory_key, deadline_)) {
    // Left to itself, this rank might end before the others have come for the memory.
    throw_timeout(-1, "not every rank fetched the group's memory");
  }
  return std::move(meeting_);
}

void Rendezvous::offer_memory() {
  static std::atomic<int> num_offers = 0;
  UniqueFd fd = create_memfd(terms_.shared_bytes);
  meeting_.memory = SharedMemory(fd.get(), terms_.shared_bytes);
  mine_.memory_key = hub_.address() + "/" + std::to_string(num_offers++);
  if (world_size_ > 1) hub_.offer(mine_.memory_key, std::move(fd), world_size_ - 1);
}

SharedMemory Rendezvous::fetch_memory() const {
  for (Backoff backoff; Clock::now() < deadline_; backoff.sleep()) {
    const RankRecord record = record_of(0);
    const UniqueFd fd = hub_.fetch(record.hub_address, record.memory_key, time_left());
    if (!fd) continue;  // the record of an earlier group, which rank 0 is about to replace
    if (size_of_memfd(fd.get()) != terms_.shared_bytes)
      throw Error({.kind = ErrorKind::kMismatch, .rank = 0, .op = "init"},
                  "ringcomm: the group's shared memory has another size than this rank expects");
    return SharedMemory(fd.get(), terms_.shared_bytes);
  }
  throw_timeout(0, "rank 0 did not hand over the group's memory");
}

RankRecord Rendezvous::meet_peer(int peer) {
  const Clock::time_point believed = std::min(deadline_, Clock::now() + kStaleGrace);
  for (Backoff backoff;; backoff.sleep()) {
    const RankRecord theirs = record_of(peer);
    const bool is_believed = Clock::now() >= believed;
    auto& process = meeting_.processes[static_cast<std::size_t>(peer)];
    try {
      check_compatible(theirs, peer);
      if (theirs.host_id != mine_.host_id || terms_.shared_bytes == 0) return theirs;
      process = hub_.watch(theirs.hub_address);
      if (process != nullptr) return theirs;
    } catch (const Error&) {
      if (is_believed) throw;
    }
    if (!is_believed) continue;
    // It was there and has ended: the first collective says so, and nothing else has to.
    process = std::make_shared<PeerProcess>();
    process->pid = theirs.pid;
    process->is_dead = true;
    return theirs;
  }
}

RankRecord Rendezvous::record_of(int peer) const {
  std::string text;
  if (!store_.get(rank_key(peer), time_left(), text))
    throw_timeout(peer, "rank " + std::to_string(peer) + " did not join the group");
  return RankRecord::from_text(text);
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

void Rendezvous::throw_timeout(int peer, const std::string& what) const {
  throw Error({.kind = ErrorKind::kTimeout, .rank = peer, .op = "init"},
              "ringcomm rank " + std::to_string(rank_) + "/" + std::to_string(world_size_) + ": " +
                  what + " in " + std::to_string(timeout_.count()) +
                  " ms; read its error, or raise the timeout of init_process_group");
}

std::chrono::milliseconds Rendezvous::time_left() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

}  // namespace ringcomm::shm
