#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/devices.h"
#include "communicator/communicator.h"
#include "cuda/collectives/device_transport.h"

namespace ringcomm {

using DeviceTransportPtr = std::unique_ptr<cuda::DeviceTransport>;

/// Kernels in memory that all ranks have mapped, or else messages, for a device's collectives.
/// Collective over the group; takes the GIL, and blocks. Throws Error, and ValueError if neither
/// supports the device.
DeviceTransportPtr make_device_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                         Communicator& communicator, const GroupOptions& options,
                                         c10::Device device);

/// Collectives over another backend, which ringcomm.message_backend chooses, for ranks that cannot
/// map each other's memory. Takes every group. With `sum_bytes`, for float sums of so many bytes
/// and more beside another transport. As make_device_transport().
DeviceTransportPtr make_message_device_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                 Communicator& communicator,
                                                 const GroupOptions& options, c10::Device device,
                                                 std::size_t sum_bytes);

}  // namespace ringcomm
