#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/collectives/record_exchange.h"
#include "cuda/collectives/staging_plan.h"
#include "cuda/driver/device_memory.h"
#include "cuda/driver/waiting_blocks.h"
#include "cuda/kernels/staging.h"
#include "host/shared_memory.h"

namespace ringcomm::cuda {

/// Memory of which every rank of a group has a part on its device, and which all have mapped.
class Segment {
 public:
  /// Collective; `num_bytes` may differ between ranks, and the first `zeroed_bytes` are zeroed.
  /// `word` belongs to the group: freeing host memory waits for all work on the GPU. Throws
  /// Unavailable, with the same reason on all ranks, if memory cannot be allocated or mapped, or
  /// has not its owner's signature.
  Segment(RecordExchange& exchange, DeviceOrdinal device, const std::vector<RankPlace>& places,
          std::size_t num_bytes, std::size_t zeroed_bytes, MappedHostMemory& word);

  /// The local address of a rank's part.
  std::byte* of(int rank) const { return parts_[static_cast<std::size_t>(rank)]->data(); }

 private:
  std::vector<std::unique_ptr<DeviceMemory>> parts_;
};

/// The devices of a group's ranks, and the memory through which their kernels communicate: every
/// rank's staging, mapped by all, and a piece of host memory.
class DeviceGroup {
 public:
  /// Collective; `exchange` outlives it. Throws Unavailable, with the same reason on all ranks, if
  /// device memory cannot be shared; Error if a rank does not arrive.
  DeviceGroup(RecordExchange& exchange, DeviceOrdinal device);
  DeviceOrdinal device() const { return device_; }
  const RankPlace& place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  const Staging& staging() const { return staging_; }
  Control& control() const { return *static_cast<Control*>(control_->host()); }
  Control* control_on_device() const { return static_cast<Control*>(control_->device()); }
  const DeviceFacts& facts() const { return facts_; }
  /// Whether ranks map each other's ordinary tensors: all do, or none (RINGCOMM_MAP_TENSORS).
  bool maps_tensors() const { return maps_tensors_; }
  GroupWords& words() const { return *reinterpret_cast<GroupWords*>(host_memory_.data()); }
  /// A number for each rank, between host and device; for one copy at a time.
  MappedHostMemory& words_for_copies() const { return *words_for_copies_; }
  const std::string& description() const { return description_; }

 private:
  void find_places();
  void read_facts();
  void share_host_memory();
  std::string describe() const;

  RecordExchange& exchange_;
  DeviceOrdinal device_;
  DeviceFacts facts_;
  bool maps_tensors_ = true;
  std::vector<RankPlace> places_;
  std::optional<WaitingBlocks::Taken> waiting_blocks_;
  std::unique_ptr<MappedHostMemory> control_;
  std::unique_ptr<MappedHostMemory> words_for_copies_;
  host::SharedMemory host_memory_;
  Staging staging_;
  std::unique_ptr<Segment> segment_;
  std::string description_;
};

}  // namespace ringcomm::cuda
