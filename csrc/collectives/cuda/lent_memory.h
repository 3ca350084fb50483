#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "collectives/collective.h"
#include "collectives/cuda/device_group.h"
#include "collectives/cuda/events.h"
#include "collectives/cuda/record_exchange.h"
#include "collectives/cuda/segment.h"
#include "device/cuda/call.h"

namespace ringcomm::cuda {

/// A rank's part of a segment, as the owner of a user's tensor has it.
class Loan {
 public:
  struct Return {
    std::size_t row;
    bool is_captured;  ///< given back while a graph was captured, which may use it
    std::vector<std::shared_ptr<const Event>> ends;  ///< of what still used it
  };
  /// Where loans of a group come back to.
  struct Returns {
    std::mutex mutex;
    bool is_closed = false;
    std::vector<Return> all;
  };

  Loan(DeviceOrdinal device, std::size_t row, std::shared_ptr<DeviceMemory> memory,
       std::shared_ptr<Returns> returns)
      : device_(device), row_(row), memory_(std::move(memory)), returns_(std::move(returns)) {}

  std::byte* data() const { return memory_->data(); }
  /// The tensor has gone: nothing uses its memory but what these streams hold now. Once, from any
  /// thread. Where the group has been destroyed, waits for the streams.
  void give_back(const std::vector<StreamHandle>& streams) const noexcept;

 private:
  DeviceOrdinal device_;
  std::size_t row_;
  std::shared_ptr<DeviceMemory> memory_;  // which a group may leave behind
  std::shared_ptr<Returns> returns_;
};

/// Segments for users' tensors, in which peers read and write the buffers of all_reduce where they
/// are. A table on the device says where each rank's part of each segment is mapped here; a segment
/// has the same row of it on all ranks.
///
/// When a segment is freed. A rank's tensor is gone when its owner has given it back and the
/// streams that used it have passed that point. A kernel reads and writes a peer's part only until
/// that peer's kernel of the same call ends, so nobody uses a part once it is gone. Each rank
/// counts its own in host memory of the group; when all are gone, each unmaps the others' parts,
/// and when all have done that, frees its own. What a graph has captured stays as long as the
/// group.
///
/// By one thread at a time.
class LentMemory {
 public:
  static constexpr std::size_t kMaxSegments = 256;
  static constexpr std::size_t num_bytes() { return kMaxSegments * sizeof(Row); }

  /// `words`: num_bytes() of host memory that all ranks have mapped, zeroed at first.
  LentMemory(RecordExchange& exchange, DeviceGroup& group, std::byte* words);
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  /// Collective. Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const Loan> lend(std::size_t num_bytes);
  /// Tells a kernel of this call's buffers, where all of them are in segments.
  void find_buffers(const Collective& call, bool is_captured, KernelCall& kernel_call);
  /// Frees what no rank has any more, where that does not make the host wait for the device. Asks
  /// the driver only about what was given back.
  void collect();

 private:
  /// In host memory.
  struct Row {
    std::uint32_t num_gone;   ///< ranks whose tensor is gone
    std::uint32_t num_users;  ///< ranks that have the segment mapped; 0: the row is free
  };
  struct Entry {
    std::unique_ptr<Segment> segment;
    bool is_captured = false;
    bool is_gone = false;
    bool has_closed = false;  // the others' parts
  };

  Row& row(std::size_t idx) const { return rows_[idx]; }
  std::size_t choose_row();
  void tell_kernels(std::size_t row, const Segment& segment);
  void take_returns();
  void close_unused();
  void free_closed();
  /// Where a buffer is; 0 where it is in no segment.
  std::uint64_t place_of(const void* data, std::size_t num_bytes, bool is_captured);

  RecordExchange& exchange_;
  DeviceGroup& group_;
  Row* rows_;
  std::array<Entry, kMaxSegments> entries_;
  int num_lent_ = 0;
  int num_gone_ = 0;                     // of those
  std::vector<Loan::Return> returning_;  // that streams have yet to pass
  std::shared_ptr<Loan::Returns> returns_;
  std::unique_ptr<DeviceMemory> bases_;         // of all ranks' parts, for kernels
  std::unique_ptr<MappedHostMemory> base_row_;  // kept, as giving it back waits for the GPU
};

}  // namespace ringcomm::cuda
