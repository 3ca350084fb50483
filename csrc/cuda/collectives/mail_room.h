#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/collectives/rank_place.h"
#include "cuda/driver/device_room.h"
#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// How many blocks the messages between two ranks of a group may have in each direction.
///
/// The first rank of a pair decides for both, and takes the seats of both. So messages without room
/// are refused on both ranks, and no kernel waits for a message that its peer has refused. A
/// decision is valid as long as the group.
///
/// On a GPU that both ranks share, they need the seats of one rank only, because only one of the
/// two ends of a direction waits.
class MailRoom {
 public:
  static constexpr std::size_t num_bytes(int world_size) {
    return static_cast<std::size_t>(world_size) * static_cast<std::size_t>(world_size) *
           sizeof(std::uint32_t);
  }

  /// `words`: num_bytes() of host memory that all ranks have mapped, zeroed at first. What is
  /// passed by reference outlives this object.
  MailRoom(std::byte* words, int rank, const std::vector<RankPlace>& places,
           const StagingLayout& layout)
      : words_(reinterpret_cast<std::uint32_t*>(words)),
        rank_(rank),
        places_(places),
        layout_(layout) {}

  /// 0 where messages with `peer` are refused. `look` is called again and again while the peer
  /// decides; what it throws ends the wait. By one thread at a time. Throws Error.
  unsigned blocks_with(int peer, const std::function<void()>& look);

 private:
  std::uint32_t& word_of(int peer) const;
  unsigned take_seats(int peer);

  std::uint32_t* words_;  ///< for each pair: kUndecided, kDeciding, or kDecided + blocks
  int rank_;
  const std::vector<RankPlace>& places_;
  const StagingLayout& layout_;
  std::vector<std::unique_ptr<DeviceRoom>> rooms_;  ///< the seats that this rank has taken
};

}  // namespace ringcomm::cuda
