#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/devices.h"
#include "collectives/communicator.h"
#include "cuda/collectives/device_carrier.h"

namespace ringcomm {

/// This rank's side of a group, for creating a carrier.
struct DeviceCarrierGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  const GroupOptions& options;
  std::shared_ptr<Communicator> communicator;  ///< of the hosts' memory
};

/// The carrier of a group's tensors on `device`: kernels in memory that all ranks have mapped, or,
/// where they cannot map it, messages. Collective over the group; takes the GIL, and blocks. Throws
/// Error, and ValueError if no carrier supports the device.
std::unique_ptr<cuda::DeviceCarrier> make_device_carrier(const DeviceCarrierGroup& group,
                                                         c10::Device device);

}  // namespace ringcomm
