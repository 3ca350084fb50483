#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/collectives/device_group.h"
#include "cuda/driver/device_memory.h"

namespace ringcomm::cuda {

/// Allocations of the ranks' own programs, such as the segments of torch's caching allocator, in
/// which peers access the buffers of collectives directly. The call after the first that uses one
/// announces it in the group's host memory; peers map it in their next call. It is lent from the
/// call on in which its owner sees that all have.
///
/// An allocation is known by the driver's number of it, which is never used again. When the number
/// at its address has changed, the owner retires the row and peers unmap it. By then no kernel uses
/// it: the owner freed it after its own kernels, which end after their peers' last access.
///
/// The driver keeps freed memory until peers have unmapped it. One thread at a time.
class PeerAllocations {
 public:
  static constexpr std::size_t kMaxRows = GroupWords::kMaxAllocations;
  /// Tells kernels where a rank's allocation is. Throws Error.
  using WriteBase = std::function<void(std::size_t row, int rank, std::byte* base)>;

  struct Place {
    std::size_t row;
    std::uint64_t offset;
    bool is_lent;  ///< otherwise staged, as peers have yet to map it or it cannot be mapped
  };

  PeerAllocations(const RecordExchange& exchange, DeviceGroup& group, WriteBase write_base);

  /// Of a buffer of this rank.
  Place place_of(const std::byte* data, std::size_t num_bytes);
  bool has_news() const {
    return !wanted_.empty() || group_.words().num_announced != num_followed_;
  }
  /// Unmaps what peers have retired, maps what they have announced, and announces what this rank's
  /// last calls used. The driver may wait for all of this rank's kernels.
  void follow();

 private:
  struct Own {
    std::uint64_t id = 0;  // 0: free
    DevicePtr base = 0;
  };
  struct Theirs {
    std::uint64_t version = 0;
    std::unique_ptr<DeviceMemory> memory = nullptr;  // null in the owner's own process
  };

  GroupWords::OfAllocation& row_of(int rank, std::size_t row) const {
    return group_.words().allocations[rank][row];
  }
  std::size_t find(std::uint64_t id) const;
  void announce(const std::byte* data);
  std::size_t free_row() const;
  bool is_freed(std::size_t row) const;
  void retire_if_freed(std::size_t row);
  void publish(std::size_t row);
  bool is_known_to_all(std::size_t row) const;
  void follow(int rank, std::size_t row);
  void refuse(bool is_refusing);

  DeviceGroup& group_;
  int rank_;
  int world_size_;
  WriteBase write_base_;
  std::vector<Own> own_;  // by row
  std::vector<std::vector<Theirs>> theirs_;
  std::vector<const std::byte*> wanted_;  // buffers in no row
  std::uint64_t num_failures_ = 0;        // to announce, one after the other
  std::uint64_t num_followed_ = 0;
  std::size_t next_look_ = 0;  // at a row of this rank, in turn
  bool is_refusing_ = false;
};

}  // namespace ringcomm::cuda
