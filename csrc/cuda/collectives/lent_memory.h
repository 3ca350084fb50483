#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/collectives/device_group.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/collectives/peer_allocations.h"

namespace ringcomm::cuda {

/// A rank's part of a segment, held by the owner of a user's tensor.
class Loan {
 public:
  struct Return {
    std::size_t row;
    bool is_captured;  ///< returned during a capture, whose graph may use it
    std::vector<std::shared_ptr<const Event>> ends;  ///< of what still used it
  };
  /// The queue of a group's returned loans.
  struct Returns {
    std::mutex mutex;
    bool is_closed = false;
    std::vector<Return> all;
  };

  Loan(DeviceOrdinal device, std::size_t row, std::shared_ptr<DeviceMemory> memory,
       std::shared_ptr<Returns> returns)
      : device_(device), row_(row), memory_(std::move(memory)), returns_(std::move(returns)) {}

  std::byte* data() const { return memory_->data(); }
  /// Call it once, from any thread: only the work that these streams hold now still uses the
  /// memory. If the group has been destroyed, waits for the streams.
  void give_back(const std::vector<StreamHandle>& streams) const noexcept;

 private:
  DeviceOrdinal device_;
  std::size_t row_;
  std::shared_ptr<DeviceMemory> memory_;  // may outlive the group
  std::shared_ptr<Returns> returns_;
};

/// Segments for users' tensors, in which peers access the buffers of collectives directly. A table
/// on the device has the local address of each rank's part of each segment; a segment has the same
/// row on all ranks. One thread at a time.
///
/// A rank's part is unused when its owner has returned it and the streams that used it have passed
/// that point. When all parts of a segment are, each rank frees it in its next call. Parts that a
/// graph has captured exist as long as the group.
class LentMemory {
 public:
  /// Of a call among the group's.
  struct Turn {
    std::uint64_t number;
    bool is_captured;
  };

  LentMemory(RecordExchange& exchange, DeviceGroup& group);
  ~LentMemory();

  /// Collective. Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const Loan> lend(std::size_t num_bytes);
  /// Frees segments that no rank uses, and tells the kernel of a planned call which of its buffers
  /// peers can use where they are.
  void find_buffers(const Collective& call, const LaunchPlan& plan, Turn turn,
                    KernelCall& kernel_call);
  /// A graph uses this address: if it is in a segment, that stays as long as the group.
  void keep_for_graph(const void* data);
  /// Memory of the ranks' own allocators.
  PeerAllocations& allocations() { return allocations_; }

 private:
  struct Entry {
    std::unique_ptr<Segment> segment;
    bool is_captured = false;
    bool is_gone = false;
  };

  GroupWords::OfSegment& row(std::size_t idx) const { return group_.words().segments[idx]; }
  std::size_t choose_row();
  void tell_kernels(std::size_t row, int first_rank, const std::vector<std::byte*>& bases);
  void take_returns();
  void free_unused();
  /// The place of a buffer; 0 if it is in no segment.
  std::uint64_t place_in_segments(const std::byte* data, std::size_t num_bytes) const;

  RecordExchange& exchange_;
  DeviceGroup& group_;
  bool maps_tensors_;
  std::vector<Entry> entries_;  // by row, of the rows that were ever in use
  int num_lent_ = 0;
  std::vector<Loan::Return> returning_;  // that streams have yet to pass
  std::shared_ptr<Loan::Returns> returns_;
  std::unique_ptr<DeviceMemory> bases_;  // of all ranks' parts, and their allocations
  PeerAllocations allocations_;
};

}  // namespace ringcomm::cuda
