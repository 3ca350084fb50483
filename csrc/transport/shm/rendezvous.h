#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/errors.h"
#include "transport/membership.h"
#include "transport/peer_table.h"
#include "transport/shm/bootstrap.h"
#include "transport/shm/fd.h"

namespace ringcomm::shm {

/// This rank of a group, and what it expects of the group.
struct GroupTerms {
  int rank = 0;
  int world_size = 1;
  /// The options that must be equal on all ranks, in readable form ("algorithm=auto num_slots=2").
  std::string options;
  std::string host_id = {};  ///< the host's identity; empty for host_id()
  KnownProcesses known = {};
  std::size_t shared_bytes = 0;  ///< of memory that all ranks share if one host has them; 0: none
  bool is_one_host = true;       ///< whether another host is an error
};

/// How the ranks of a group find each other, and how the ranks of one host come to share memory.
///
/// Every rank publishes a record in the store, reads the others', and starts watching the processes
/// on its own machine. The first rank of each host offers the memory that its ranks share at its
/// bootstrap, and stays until all have fetched it (Group). The store may hold records of an earlier
/// group, so a record that does not fit is read again for a second before it is accepted. A record
/// of another host fits if several hosts are allowed, so ranks must not move between hosts over one
/// store.
///
/// Every wait checks at least every 50 ms the processes found so far, the deadline, and signals. A
/// rank that dies is reported as soon as it is certain that it had not joined; one on another
/// machine is only seen as missing at the deadline. A rank that fails adds the reason to its
/// record, for the ranks that see its process end.
class Rendezvous {
 public:
  /// `store` must outlive this object.
  Rendezvous(KeyValueStore& store, const GroupTerms& terms, std::chrono::milliseconds timeout);
  /// Withdraws the memory from the bootstrap.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Collective, first. Throws Error: kTimeout naming a rank that does not appear, kPeerDied naming
  /// one that ended, kInterrupted, kMismatch naming both sides' options, kSystem for a rank on
  /// another host where that is an error.
  PeerTable find_ranks();
  /// Collective over the ranks of a host (`ranks`, ascending), after find_ranks(): maps the memory
  /// of the first of them. Throws the same, and kSystem if the memory cannot be mapped.
  SharedMemory share_memory(const std::vector<int>& ranks, std::size_t num_bytes);
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

  int rank() const { return terms_.rank; }
  int world_size() const { return terms_.world_size; }
  const RankRecord& mine() const { return mine_; }
  const PeerProcesses& processes() const { return processes_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Peer {
    std::string text = {};  // its record, once it is accepted
    RankRecord record = {};
    std::optional<Clock::time_point> doubted_since = {};  // when one was first seen that was not
  };

  template <class Action>
  auto tell_if_it_fails(const Action& action);
  void offer_memory(std::size_t num_ranks, std::size_t num_bytes);
  SharedMemory fetch_memory(const std::vector<int>& ranks, std::size_t num_bytes);

  const Peer& peer_of(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  const PeerProcess& process_of(int rank) const {
    return *processes_[static_cast<std::size_t>(rank)];
  }
  bool has_met(int peer) const { return !peer_of(peer).text.empty(); }
  bool meet(int peer);
  std::shared_ptr<PeerProcess> find_process(const RankRecord& theirs, int peer, bool is_believed);
  void check_compatible(const RankRecord& theirs, int peer) const;
  bool is_replaced();
  bool has_died(int peer);
  int dead_rank();
  void look_while_missing(std::deque<int>& missing);

  ErrorInfo info_of(int peer, ErrorKind kind) const;
  std::string name_of(int peer) const;
  std::string prefix() const;

  KeyValueStore& store_;
  GroupTerms terms_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  Bootstrap& bootstrap_;
  RankRecord mine_;
  std::vector<Peer> peers_;  // by rank
  PeerProcesses processes_;
  std::vector<int> sharing_;  // the ranks of this host, from share_memory() on
  SharedMemory memory_;       // that this rank offers
  std::string offer_key_;
};

}  // namespace ringcomm::shm
