#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/errors.h"
#include "transport/key_value_store.h"
#include "transport/membership.h"
#include "transport/peer_table.h"
#include "transport/shm/bootstrap.h"
#include "transport/shm/rank_record.h"
#include "transport/shm/shared_memory.h"

namespace ringcomm::shm {

/// The process of each rank; null for this rank, and for ranks on other machines.
using PeerProcesses = std::vector<std::shared_ptr<PeerProcess>>;

/// Whether the process of `rank` is among them, and dead, stopped, has exited, or has a hidden pid.
bool has_died(const PeerProcesses& processes, int rank);
bool is_stopped(const PeerProcesses& processes, int rank);
bool has_exited(const PeerProcesses& processes, int rank);
bool is_pid_hidden(const PeerProcesses& processes, int rank);
/// What the process of `rank` reported before it ended; empty if it is not among them or reported
/// nothing.
std::string last_words_of(const PeerProcesses& processes, int rank);

/// The identity of this rank in a group.
struct GroupIdentity {
  int rank = 0;
  int world_size = 1;
  /// The options that must be equal on all ranks, in readable form ("algorithm=auto num_slots=2").
  std::string options;
  std::string host_id = {};  ///< the host's identity; empty for host_id()
  KnownProcesses known = {};
};

/// How the ranks of a group find each other, and how the ranks of one host come to share memory.
///
/// Every rank publishes a record in the store, reads the others', and starts watching the processes
/// on its own machine. The first rank of each host makes the memory that its ranks share and offers
/// it at its bootstrap; the others fetch it, and the first stays until all have it (Group). The
/// store may hold records of an earlier group, because programs destroy and make groups over the
/// same store. So a record that does not fit is read again for a second before it is accepted. A
/// record of another host fits if several hosts are allowed, so ranks must not move between hosts
/// over one store.
///
/// Every wait checks at least every 50 ms the processes found so far, the deadline, and signals. A
/// rank that dies is reported as soon as it is certain that it had not joined. No rank completes
/// the group while a record is missing, before all ranks of its host have the memory, or, if
/// messages are needed, before all ranks have created theirs. A rank on another machine is only
/// seen as missing at the deadline.
///
/// A rank that fails adds the reason to its record, for the ranks that see its process end.
class Rendezvous {
 public:
  /// The shared memory and processes of one host's ranks.
  struct Meeting {
    SharedMemory memory;
    PeerProcesses processes;  ///< by their places among the ranks that share the memory
  };

  /// The group's requirements.
  struct Terms {
    std::size_t shared_bytes = 0;  ///< of memory that all ranks share if one host has them; 0: none
    bool is_one_host = true;       ///< whether another host is an error
  };

  /// `store` must outlive this object.
  Rendezvous(KeyValueStore& store, const GroupIdentity& identity, const Terms& terms,
             std::chrono::milliseconds timeout);
  /// Withdraws the memory from the bootstrap if not every rank has fetched it.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Collective, first. Throws Error: kTimeout naming a rank that does not appear, kPeerDied naming
  /// one that ended, kInterrupted, kMismatch naming both sides' options, kSystem for a rank on
  /// another host where that is an error.
  PeerTable find_ranks();
  /// Collective over the ranks of a host (`ranks`, ascending), after find_ranks(): maps the memory
  /// of the first of them. Throws Error: kTimeout, kPeerDied, kInterrupted, and kSystem if the
  /// memory cannot be mapped. The offer ends with this object.
  Meeting share_memory(const std::vector<int>& ranks, std::size_t num_bytes);
  /// Waits for the value that `peer` sets at `key`; every rank sets one when it joins. Throws like
  /// find_ranks().
  std::string wait_for(const std::string& key, int peer);

  /// One check while this rank polls for something that exists only after all ranks have joined.
  /// Throws Error: kPeerDied if any rank has ended, and like check_time().
  void look(int peer, const std::string& what);
  /// Throws Error: kPeerDied for a rank of another host than this one's, kInterrupted, or kTimeout
  /// that blames a stopped rank, or else `peer`, for `what` once time is up.
  void check_time(int peer, const std::string& what);
  /// Throws Error of kPeerDied, or what the rank failed with before it ended.
  [[noreturn]] void throw_died(int peer) const;
  /// Throws Error of what another rank has failed with.
  [[noreturn]] void throw_told(const AbortReason& reason) const;
  /// Adds the reason why this rank fails to its record.
  void tell(const Error& error);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const RankRecord& mine() const { return mine_; }
  /// By rank.
  const PeerProcesses& processes() const { return processes_; }

 private:
  using Clock = std::chrono::steady_clock;

  PeerTable find_all();
  void offer_memory(std::size_t num_bytes);
  SharedMemory fetch_memory(const std::vector<int>& ranks, std::size_t num_bytes);
  std::string memory_key_of(int leader, bool is_whole);
  ErrorInfo info_of(int peer, ErrorKind kind) const;
  std::string name_of(int peer) const;
  bool has_met(int peer) const { return !texts_[static_cast<std::size_t>(peer)].empty(); }
  std::string prefix() const;
  bool can_watch(const RankRecord& theirs) const;
  int dead_rank();
  bool meet(int peer);
  bool is_elsewhere(int peer);
  void check_not_cloned(const RankRecord& theirs, int peer) const;
  bool has_died(int peer);
  bool is_known_dead(int peer) const;
  bool is_stopped(int peer) const;
  void look_while_missing(std::deque<int>& missing);
  void check_compatible(const RankRecord& theirs, int peer) const;

  KeyValueStore& store_;
  int rank_;
  int world_size_;
  KnownProcesses known_;
  Terms terms_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  Bootstrap& bootstrap_;
  RankRecord mine_;
  std::vector<std::string> texts_;           // by rank: its record, once it is accepted
  std::map<int, Clock::time_point> doubts_;  // by rank: when its unaccepted record was first seen
  PeerProcesses processes_;
  std::vector<int> sharing_;  // with several hosts: the ranks of this host, during share_memory()
  SharedMemory memory_;
};

}  // namespace ringcomm::shm
