#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/cuda/rank_place.h"
#include "core/cursor.h"
#include "transport/shm/process_hub.h"

namespace ringcomm::cuda {

/// What this rank has exported by IPC handles, and keeps until no peer has it open any more: CUDA
/// leaves undefined what happens when the owner frees it earlier.
///
/// A rank says in host memory of the group that it has closed all that it had opened. The owner
/// frees its own when all peers have said so, or have died. What a living peer still has open after
/// kPatience is never freed: it goes with this process.
///
/// Memory by file descriptors needs none of this: the driver counts its users.
class Leaving {
 public:
  static constexpr std::size_t num_bytes(int world_size) {
    return static_cast<std::size_t>(world_size) * kLineBytes;
  }

  /// `words`: num_bytes() of host memory that all ranks have mapped, zeroed at first, which
  /// outlives this object.
  Leaving(std::byte* words, int rank, const std::vector<RankPlace>& places);
  /// After all that this rank has opened in the group is closed. Waits for kPatience at most.
  ~Leaving();
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

  /// From the export on.
  void keep(std::shared_ptr<void> exported) { exported_.push_back(std::move(exported)); }
  /// All peers have closed it, or never opened it.
  void drop(const std::shared_ptr<void>& exported) { std::erase(exported_, exported); }

 private:
  bool all_have_closed() const;
  std::uint32_t& has_closed(std::size_t rank) const {
    return *reinterpret_cast<std::uint32_t*>(words_ + rank * kLineBytes);
  }

  std::byte* words_;
  std::size_t rank_;
  /// Of the ranks of other processes; null for those of this one, which open nothing.
  std::vector<std::shared_ptr<shm::PeerProcess>> peers_;
  std::vector<std::shared_ptr<void>> exported_;
};

}  // namespace ringcomm::cuda
