#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/cuda/leaving.h"
#include "collectives/cuda/rank_place.h"
#include "collectives/cuda/record_exchange.h"
#include "transport/cuda/device_memory.h"
#include "transport/shm/unique_fd.h"

namespace ringcomm::cuda {

/// Memory of which every rank of a group has a part on its device, and which all have mapped.
class Segment {
 public:
  /// Collective; `num_bytes` may differ from rank to rank. `leaving` is the group's, and so is
  /// `word`, eight bytes that outlive this object: to free them waits for all that the GPU does.
  /// Throws Unavailable, with the same reason on all ranks, where the memory cannot be had or
  /// mapped, or is not what its owner says.
  Segment(RecordExchange& exchange, DeviceOrdinal device, const std::vector<RankPlace>& places,
          HandleKind kind, std::size_t num_bytes, Leaving& leaving, MappedHostMemory& word);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  /// Where a rank's part lies here; zeroed at first.
  std::byte* of(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  /// Of this rank's part.
  std::size_t num_bytes() const { return num_bytes_; }
  /// Unmaps the other ranks' parts, which nothing uses any more.
  void close_others() { theirs_.clear(); }
  /// This rank's part alone, which may outlive the segment.
  const std::shared_ptr<DeviceMemory>& own() const { return own_; }

 private:
  struct Part;  // what a rank says of its own

  Part make_own(RecordExchange& exchange, HandleKind kind, Leaving& leaving);
  void map(int peer, const RankPlace& place, const Part& part);
  void sign_own(int rank);
  void clear_own();
  void probe(int peer);

  DeviceOrdinal device_;
  std::size_t num_bytes_;
  MappedHostMemory& word_;
  std::shared_ptr<DeviceMemory> own_;
  /// Of the others: mapped, or, of a thread of this process, the memory itself.
  std::vector<std::shared_ptr<DeviceMemory>> theirs_;
  std::vector<std::byte*> parts_;
  std::string offer_key_;
};

/// What the hub of a rank's process offers under `key`. Throws Error.
shm::UniqueFd fetch_from(const RankPlace& place, int rank, const std::string& key);
/// A key under which this process has offered nothing yet.
std::string new_offer_key();

/// Throws Unavailable with the first rank's `problem`, if any has one.
void check_problems(const std::vector<RecordText<256>>& problems);

/// Collective: tells all how attempts went.
inline void agree(RecordExchange& exchange, const RecordText<256>& problem) {
  check_problems(exchange.all_gather(problem));
}

}  // namespace ringcomm::cuda
