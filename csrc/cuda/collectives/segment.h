#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/collectives/leaving.h"
#include "cuda/collectives/rank_place.h"
#include "cuda/collectives/record_exchange.h"
#include "cuda/driver/device_memory.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// Memory of which every rank of a group has a part on its device, and which all have mapped.
class Segment {
 public:
  /// Collective; `num_bytes` may differ between ranks. `leaving` belongs to the group, as does
  /// `word`: eight bytes that outlive this object, because freeing them waits for all work on the
  /// GPU. Throws Unavailable, with the same reason on all ranks, if the memory cannot be allocated
  /// or mapped, or does not have its owner's signature.
  Segment(RecordExchange& exchange, DeviceOrdinal device, const std::vector<RankPlace>& places,
          HandleKind kind, std::size_t num_bytes, Leaving& leaving, MappedHostMemory& word);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  /// The local address of a rank's part; zeroed at first.
  std::byte* of(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  /// The size of this rank's part.
  std::size_t num_bytes() const { return num_bytes_; }
  /// Unmaps the other ranks' parts, which nothing uses any more.
  void close_others() { theirs_.clear(); }
  /// This rank's part alone, which may outlive the segment.
  const std::shared_ptr<DeviceMemory>& own() const { return own_; }

 private:
  struct Part;  // a rank's record of its part

  Part make_own(RecordExchange& exchange, HandleKind kind, Leaving& leaving);
  void map(int peer, const RankPlace& place, const Part& part);
  void sign_own(int rank);
  void clear_own();
  void probe(int peer);

  DeviceOrdinal device_;
  std::size_t num_bytes_;
  MappedHostMemory& word_;
  std::shared_ptr<DeviceMemory> own_;
  /// The other ranks' memory: mapped, or the memory itself if the rank is a thread of this process.
  std::vector<std::shared_ptr<DeviceMemory>> theirs_;
  std::vector<std::byte*> parts_;
  std::string offer_key_;
};

/// Fetches what the bootstrap of a rank's process offers under `key`. Throws Error.
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
