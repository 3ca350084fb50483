#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/collectives/record_exchange.h"
#include "cuda/collectives/segment.h"
#include "cuda/collectives/staging_plan.h"
#include "cuda/driver/block_reservation.h"
#include "cuda/driver/device_memory.h"
#include "cuda/kernels/staging.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// How many blocks the messages between two ranks of a group may have in each direction.
///
/// The first rank of a pair decides for both, and reserves the blocks of both. So messages without
/// room are refused on both ranks, and no kernel waits for a message that its peer has refused. A
/// decision is valid as long as the group.
///
/// On a GPU that both ranks share, the blocks of one rank are enough, because only one of the two
/// ends of a direction waits.
class MessageBlocks {
 public:
  /// What is passed by reference outlives this object.
  MessageBlocks(GroupWords& words, int rank, const std::vector<RankPlace>& places,
                const StagingLayout& layout)
      : words_(words), rank_(rank), places_(places), layout_(layout) {}

  /// 0 where messages with `peer` are refused. `look` is called again and again while the peer
  /// decides; what it throws ends the wait. By one thread at a time. Throws Error.
  unsigned with(int peer, const std::function<void()>& look);

 private:
  unsigned reserve(int peer);

  GroupWords& words_;
  int rank_;
  const std::vector<RankPlace>& places_;
  const StagingLayout& layout_;
  std::vector<std::unique_ptr<BlockReservation>> reservations_;  ///< by this rank, for both
};

/// The devices of a group's ranks, and the memory through which their kernels communicate: every
/// rank's staging, mapped by all, and a piece of host memory.
class DeviceGroup {
 public:
  /// Collective. Throws Unavailable, with the same reason on all ranks, if device memory cannot be
  /// shared; Error if a rank does not arrive.
  DeviceGroup(RecordExchange& exchange, DeviceOrdinal device);

  DeviceOrdinal device() const { return device_; }
  const Staging& staging() const { return staging_; }
  Control& control() const { return *static_cast<Control*>(control_->host()); }
  Control* control_on_device() const { return static_cast<Control*>(control_->device()); }
  /// Whether kernels of two ranks may never run at the same time, so that none may wait for
  /// another.
  bool takes_turns() const { return facts_.takes_turns; }
  /// Why, and what to do: the end of an error's text.
  const std::string& why_turns() const { return why_turns_; }
  const std::vector<RankPlace>& places() const { return places_; }
  HandleKind handle_kind() const { return kind_; }
  MessageBlocks& message_blocks() const { return *message_blocks_; }
  GroupWords& words() const { return *reinterpret_cast<GroupWords*>(host_memory_.data()); }
  Exports& exports() const { return *exports_; }
  /// For Segments of the group.
  MappedHostMemory& word() const { return *word_; }
  /// "cuda_ipc by file descriptors: 4 ranks on 1 GPU under MPS, 66 blocks, 4.0 MiB of staging each"
  const std::string& description() const { return description_; }

 private:
  struct Place;  // a rank's record of its device
  std::vector<Place> find_places(RecordExchange& exchange);
  void read_facts(const std::vector<Place>& places);
  void reserve_blocks(RecordExchange& exchange);
  void share_staging(RecordExchange& exchange);
  void share_host_memory(RecordExchange& exchange);
  std::string describe() const;

  DeviceOrdinal device_;
  DeviceFacts facts_;
  std::string why_turns_;
  /// For blocks of this group's collectives.
  std::unique_ptr<BlockReservation> reservation_;
  std::vector<RankPlace> places_;
  HandleKind kind_ = HandleKind::kFd;
  std::unique_ptr<MappedHostMemory> control_;
  std::unique_ptr<MappedHostMemory> word_;
  shm::SharedMemory host_memory_;
  std::unique_ptr<Exports> exports_;  // destroyed after everything else is closed
  Staging staging_;
  std::unique_ptr<MessageBlocks> message_blocks_;
  std::unique_ptr<Segment> segment_;
  std::string description_;
};

}  // namespace ringcomm::cuda
