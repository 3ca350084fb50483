#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cuda/collectives/mail_room.h"
#include "cuda/collectives/record_exchange.h"
#include "cuda/collectives/segment.h"
#include "cuda/collectives/staging_plan.h"
#include "cuda/driver/device_memory.h"
#include "cuda/driver/device_room.h"
#include "cuda/kernels/control.h"
#include "cuda/kernels/staging.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// The devices of a group's ranks, and the memory through which their kernels communicate: every
/// rank's staging, mapped by all, and a piece of host memory.
class DeviceGroup {
 public:
  /// Collective. Throws Unavailable, with the same reason on all ranks, if device memory cannot be
  /// shared; Error if a rank does not arrive.
  DeviceGroup(RecordExchange& exchange, DeviceOrdinal device, std::size_t host_bytes);
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

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
  MailRoom& mail_room() const { return *mail_room_; }
  /// `host_bytes` of host memory that all ranks have mapped, zeroed at first.
  std::byte* host_memory() const { return host_memory_.data() + own_host_bytes(); }
  Leaving& leaving() const { return *leaving_; }
  /// For Segments of the group.
  MappedHostMemory& word() const { return *word_; }
  /// "cuda_ipc by file descriptors: 4 ranks on 1 GPU under MPS, 66 blocks, 4.0 MiB of staging each"
  const std::string& description() const { return description_; }

 private:
  struct Place;  // a rank's record of its device
  std::vector<Place> find_places(RecordExchange& exchange);
  int world_size() const { return facts_.world_size; }
  /// The host bytes of Leaving and MailRoom, which precede the engine's.
  std::size_t own_host_bytes() const;
  void read_facts(const std::vector<Place>& places);
  void take_seats(RecordExchange& exchange);
  void share_staging(RecordExchange& exchange);
  void share_host_memory(RecordExchange& exchange, std::size_t num_bytes);
  std::string describe() const;

  DeviceOrdinal device_;
  DeviceFacts facts_;
  std::string why_turns_;
  /// Seats for blocks of this group's kernels, until those are over.
  std::unique_ptr<DeviceRoom> room_;
  std::vector<RankPlace> places_;
  HandleKind kind_ = HandleKind::kFd;
  std::unique_ptr<MappedHostMemory> control_;
  std::unique_ptr<MappedHostMemory> word_;
  shm::SharedMemory host_memory_;
  std::unique_ptr<Leaving> leaving_;  // destroyed after everything else is closed
  Staging staging_;
  std::unique_ptr<MailRoom> mail_room_;
  std::unique_ptr<Segment> segment_;
  std::string description_;
};

}  // namespace ringcomm::cuda
