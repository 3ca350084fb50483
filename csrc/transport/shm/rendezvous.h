#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "transport/key_value_store.h"
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
};

/// How the ranks of a group find each other and come to share memory.
///
/// Rank 0 makes the memory and offers it at its hub; every rank publishes a record in the store,
/// reads the others' and starts watching their processes, and fetches the memory. Rank 0 stays
/// until all have it. The store may hold records of an earlier group, since programs destroy and
/// make groups over the same one: a record that does not fit is read again for a second before it
/// is believed.
class Rendezvous {
 public:
  /// What the ranks have when they have met.
  struct Meeting {
    SharedMemory memory;
    std::vector<std::shared_ptr<PeerProcess>> processes;  ///< by rank; null for this one
  };

  Rendezvous(KeyValueStore& store, const GroupIdentity& identity,
             std::chrono::milliseconds timeout);

  /// Collective. Throws Error: kTimeout naming a rank that does not appear, kMismatch naming both
  /// sides' options, kSystem when ranks are on different hosts or the memory cannot be had.
  Meeting meet(std::size_t num_bytes);

 private:
  using Clock = std::chrono::steady_clock;

  SharedMemory offer_memory(std::size_t num_bytes);
  SharedMemory fetch_memory(std::size_t num_bytes) const;
  std::shared_ptr<PeerProcess> meet_peer(int peer) const;
  RankRecord record_of(int peer) const;
  void check_compatible(const RankRecord& theirs, int peer) const;
  [[noreturn]] void throw_timeout(int peer, const std::string& what) const;
  std::chrono::milliseconds time_left() const;

  KeyValueStore& store_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  ProcessHub& hub_;
  RankRecord mine_;
};

}  // namespace ringcomm::shm
