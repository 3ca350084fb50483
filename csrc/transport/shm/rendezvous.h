#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/key_value_store.h"
#include "transport/roster.h"
#include "transport/shm/process_hub.h"
#include "transport/shm/rank_record.h"
#include "transport/shm/shared_memory.h"

namespace ringcomm::shm {

/// Who this rank is in a group.
struct GroupIdentity {
  int rank = 0;
  int world_size = 1;
  /// What must be equal on all ranks, in words a person can compare ("algorithm=auto num_slots=2").
  std::string options;
  std::string host_id = {};  ///< where it is; empty: what host_id() says
  /// Whether the process of a rank is known, from another group, to have ended. May be empty.
  std::function<bool(int rank)> has_died = {};
};

/// How the ranks of a group find each other, and those of one host come to share memory.
///
/// Every rank publishes a record in the store, reads the others', and starts watching the processes
/// on its own host. Where all are on one host, rank 0 makes the memory and offers it at its hub;
/// the others fetch it, and rank 0 stays until all have it (Group). The store may hold records of
/// an earlier group, since programs destroy and make groups over the same one: a record that does
/// not fit is read again for a second before it is believed. A record of another host fits where
/// hosts may be several: over one store, ranks must not have moved between hosts.
///
/// No wait is blind: each looks at least every 50 ms at the processes that this rank has met, at
/// the deadline, and at signals. A rank that dies is named as soon as it is certain that it had not
/// joined: no rank can complete the group while another one's record is missing, nor without rank
/// 0, which knows who has the memory.
class Rendezvous {
 public:
  /// What the ranks of one host have when they have met.
  struct Meeting {
    SharedMemory memory;
    std::vector<std::shared_ptr<PeerProcess>> processes;  ///< by rank; null for this one
  };

  /// What the group wants of its ranks.
  struct Terms {
    std::size_t shared_bytes = 0;  ///< of memory that all of one host share; 0: none
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
  /// After all ranks were found on one host: the memory of rank 0, mapped. Throws Error: kTimeout,
  /// kPeerDied, kInterrupted, and kSystem where the memory cannot be had. Rank 0's offer ends with
  /// this object.
  Meeting share_memory();

  /// Throws Error: kInterrupted, or kTimeout that blames `peer` for `what` once time is up.
  void check_time(int peer, const std::string& what) const;
  /// Throws Error of kPeerDied.
  [[noreturn]] void throw_died(int peer) const;

 private:
  using Clock = std::chrono::steady_clock;

  void offer_memory();
  SharedMemory fetch_memory();
  bool meet(int peer);
  bool has_died(int peer);
  bool is_known_dead(int peer) const;
  void look_while_missing(std::deque<int>& missing);
  void check_compatible(const RankRecord& theirs, int peer) const;

  KeyValueStore& store_;
  int rank_;
  int world_size_;
  std::function<bool(int rank)> has_died_elsewhere_;
  Terms terms_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  ProcessHub& hub_;
  RankRecord mine_;
  std::vector<std::string> texts_;           // by rank: its record, once it is believed
  std::map<int, Clock::time_point> doubts_;  // by rank: since when its record is there unbelieved
  Meeting meeting_;
};

}  // namespace ringcomm::shm
