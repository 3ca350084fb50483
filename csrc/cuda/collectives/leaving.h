#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/arch.h"
#include "cuda/collectives/rank_place.h"
#include "transport/shm/bootstrap.h"

namespace ringcomm::cuda {

/// Memory and events that this rank has exported by IPC handles. It keeps them until no peer has
/// them open, because freeing them earlier is undefined in CUDA.
///
/// A rank reports in the group's host memory that it has closed everything that it had opened. An
/// owner frees its exports when all peers have reported this or have died. An export that a live
/// peer still has open after kPatience is leaked until this process ends.
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

  /// Call it at the export.
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
  /// The ranks' processes; null for ranks of this process, which open nothing.
  std::vector<std::shared_ptr<PeerProcess>> peers_;
  std::vector<std::shared_ptr<void>> exported_;
};

}  // namespace ringcomm::cuda
