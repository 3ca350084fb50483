#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/collectives/record_exchange.h"
#include "cuda/collectives/staging_plan.h"
#include "cuda/driver/block_reservation.h"
#include "cuda/driver/device_memory.h"
#include "cuda/kernels/staging.h"
#include "host/shared_memory.h"

namespace ringcomm::cuda {

/// Memory of which every rank of a group has a part on its device, and which all have mapped.
class Segment {
 public:
  /// Collective; `num_bytes` may differ between ranks. `word` belongs to the group: freeing host
  /// memory waits for all work on the GPU. Throws Unavailable, with the same reason on all ranks,
  /// if memory cannot be allocated or mapped, or has not its owner's signature.
  Segment(RecordExchange& exchange, DeviceOrdinal device, const std::vector<RankPlace>& places,
          std::size_t num_bytes, MappedHostMemory& word);

  /// The local address of a rank's part; zeroed at first.
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
  /// Whether no kernel may wait for another rank's.
  bool takes_turns() const { return facts_.takes_turns; }
  /// Why, and what to do: the end of an error's text.
  const std::string& why_turns() const { return why_turns_; }
  /// Whether ranks map each other's ordinary tensors: all do, or none (RINGCOMM_MAP_TENSORS).
  bool maps_tensors() const { return maps_tensors_; }
  GroupWords& words() const { return *reinterpret_cast<GroupWords*>(host_memory_.data()); }
  /// A number for each rank, between host and device; for one copy at a time.
  MappedHostMemory& words_for_copies() const { return *words_for_copies_; }
  const std::string& description() const { return description_; }

  /// The blocks of messages with `peer` in each direction; 0 where messages are refused.
  ///
  /// The first rank of a pair decides for both, for the life of the group, and reserves the blocks
  /// of both: no kernel waits for a message that its peer has refused.
  /// `look` is called again and again while the peer decides, with whether it has; what it throws
  /// ends the wait. By one thread at a time. Throws Error.
  using LookAtPeer = std::function<void(const std::function<bool()>& has_come)>;
  unsigned places_of_messages(int peer, const LookAtPeer& look);

 private:
  void find_places();
  void read_facts();
  void reserve_places();
  void share_host_memory();
  unsigned reserve_for_messages(int peer);
  std::string describe() const;

  RecordExchange& exchange_;
  DeviceOrdinal device_;
  DeviceFacts facts_;
  std::string why_turns_;
  bool maps_tensors_ = true;
  /// For blocks of this group's collectives.
  std::unique_ptr<BlockReservation> reservation_;
  std::vector<RankPlace> places_;
  std::unique_ptr<MappedHostMemory> control_;
  std::unique_ptr<MappedHostMemory> words_for_copies_;
  host::SharedMemory host_memory_;
  Staging staging_;
  std::vector<std::unique_ptr<BlockReservation>> message_reservations_;
  std::unique_ptr<Segment> segment_;
  std::string description_;
};

}  // namespace ringcomm::cuda
