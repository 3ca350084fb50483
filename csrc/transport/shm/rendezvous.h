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
#include "transport/roster.h"
#include "transport/shm/process_hub.h"
#include "transport/shm/rank_record.h"
#include "transport/shm/shared_memory.h"

namespace ringcomm::shm {

/// Of each rank its process; null for this one's, and for those on other machines.
using PeerProcesses = std::vector<std::shared_ptr<PeerProcess>>;

/// Whether the process of `rank` is among them, and stopped.
bool is_stopped(const PeerProcesses& processes, int rank);
/// What the process of `rank` said before it ended; empty where it is none of them or said nothing.
std::string last_words_of(const PeerProcesses& processes, int rank);

/// Who this rank is in a group.
struct GroupIdentity {
  int rank = 0;
  int world_size = 1;
  /// What must be equal on all ranks, in words a person can compare ("algorithm=auto num_slots=2").
  std::string options;
  std::string host_id = {};  ///< where it is; empty: what host_id() says
  KnownProcesses known = {};
};

/// How the ranks of a group find each other, and those of one host come to share memory.
///
/// Every rank publishes a record in the store, reads the others', and starts watching the processes
/// on its own machine. The first rank of each host makes the memory that its ranks share and offers
/// it at its hub; the others fetch it, and the first stays until all have it (Group). The store may
/// hold records of an earlier group, since programs destroy and make groups over the same one: a
/// record that does not fit is read again for a second before it is believed. A record of another
/// host fits where hosts may be several: over one store, ranks must not have moved between hosts.
///
/// No wait is blind: each looks at least every 50 ms at the processes that this rank has met, at
/// the deadline, and at signals. A rank that dies is named as soon as it is certain that it had not
/// joined: no rank can complete the group while another one's record is missing, nor without the
/// rank that knows who has the memory, nor, where messages are needed, before all ranks have made
/// theirs. Of a rank on another machine only its absence is seen, at the deadline.
class Rendezvous {
 public:
  /// What the ranks of one host have when they have met.
  struct Meeting {
    SharedMemory memory;
    PeerProcesses processes;  ///< by their places among the ranks that share the memory
  };

  /// What the group wants of its ranks.
  struct Terms {
    std::size_t shared_bytes = 0;  ///< of memory that all ranks share if one host has them; 0: none
    bool is_one_host = true;       ///< whether another host is an error
  };

  /// `store` must live as long.
  Rendezvous(KeyValueStore& store, const GroupIdentity& identity, const Terms& terms,
             std::chrono::milliseconds timeout);
  /// Takes the memory back from the hub when not every rank has come for it.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Collective, first. Throws Error: kTimeout naming a rank that does not appear, kPeerDied naming
  /// one that ended, kInterrupted, kMismatch naming both sides' options, kSystem for a rank on
  /// another host where that is an error.
  Roster find_ranks();
  /// After that, on the ranks of a host (`ranks`, ascending): the memory of the first of them,
  /// mapped. Throws Error: kTimeout, kPeerDied, kInterrupted, and kSystem where the memory cannot
  /// be had. The offer ends with this object.
  Meeting share_memory(const std::vector<int>& ranks, std::size_t num_bytes);
  /// What `peer` sets at `key`, which every rank does that joins. Throws as find_ranks() does.
  std::string wait_for(const std::string& key, int peer);

  /// One look between two at something that no rank has before all ranks have joined. Throws Error:
  /// kPeerDied where any has ended, and what check_time() does.
  void look(int peer, const std::string& what);
  /// Throws Error: kPeerDied for a rank of another host than this one's, kInterrupted, or kTimeout
  /// that blames a stopped rank, or else `peer`, for `what` once time is up.
  void check_time(int peer, const std::string& what);
  /// Throws Error of kPeerDied.
  [[noreturn]] void throw_died(int peer) const;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const RankRecord& mine() const { return mine_; }
  /// By rank.
  const PeerProcesses& processes() const { return processes_; }

 private:
  using Clock = std::chrono::steady_clock;

  void offer_memory(std::size_t num_bytes);
  SharedMemory fetch_memory(const std::vector<int>& ranks, std::size_t num_bytes);
  std::string memory_key_of(int leader, bool is_whole);
  ErrorInfo info_of(int peer, ErrorKind kind) const;
  std::string name_of(int peer) const;
  std::string prefix() const;
  bool can_watch(const RankRecord& theirs) const;
  int dead_rank();
  bool meet(int peer);
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
  ProcessHub& hub_;
  RankRecord mine_;
  std::vector<std::string> texts_;           // by rank: its record, once it is believed
  std::map<int, Clock::time_point> doubts_;  // by rank: since when its record is there unbelieved
  PeerProcesses processes_;
  std::vector<int> sharing_;  // of several hosts: the ranks of this one, once it is their turn
  SharedMemory memory_;
};

}  // namespace ringcomm::shm
