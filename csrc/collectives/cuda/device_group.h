#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "collectives/cuda/launch_plan.h"
#include "collectives/cuda/record_exchange.h"
#include "device/cuda/control.h"
#include "device/cuda/staging.h"
#include "transport/cuda/device_memory.h"
#include "transport/shm/shared_memory.h"

namespace ringcomm::cuda {

/// Where the ranks of a group have their devices, and the memory by which their kernels meet: every
/// rank's staging, mapped by all, and a piece of host memory.
class DeviceGroup {
 public:
  /// Collective. Throws Unavailable, with the same reason on all ranks, where memory of the devices
  /// cannot be shared; Error where a rank does not come.
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
  /// Host memory that all ranks have mapped, zeroed at first.
  std::byte* host_memory() const { return host_memory_.data(); }
  /// "cuda_ipc by file descriptors: 4 ranks on 1 GPU under MPS, 66 blocks, 4.0 MiB of staging each"
  const std::string& description() const { return description_; }

 private:
  struct Place;   // what a rank says of its device
  struct Memory;  // and of its staging

  std::vector<Place> find_places(RecordExchange& exchange);
  void read_facts(const std::vector<Place>& places);
  void share(RecordExchange& exchange, const std::vector<Place>& places, HandleKind kind,
             std::size_t host_bytes);
  Memory make_memory(RecordExchange& exchange, HandleKind kind, std::size_t host_bytes);
  void map_peer(int peer, const Place& place, const Memory& memory, std::size_t host_bytes);
  void clear_staging(int rank);
  void probe_peer(int peer);

  DeviceOrdinal device_;
  DeviceFacts facts_;
  Staging staging_;
  std::unique_ptr<DeviceMemory> own_;
  std::vector<std::unique_ptr<DeviceMemory>> mapped_;
  std::unique_ptr<MappedHostMemory> control_;
  shm::SharedMemory host_memory_;
  std::string offer_key_;
  std::string host_offer_key_;
  std::string description_;
};

}  // namespace ringcomm::cuda
