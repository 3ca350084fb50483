#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/devices.h"
#include "communicator/communicator.h"
#include "cuda/collectives/device_transport.h"

namespace ringcomm {

/// Collectives of device tensors over another backend, which ringcomm.message_backend chooses, for
/// ranks that cannot map each other's memory. Takes every group. Collective over it; takes the GIL.
/// With `sum_bytes`, for float sums of so many bytes and more beside another transport. Throws
/// Error, and ValueError if no backend supports the device.
std::unique_ptr<cuda::DeviceTransport> make_message_device_transport(
    const c10::intrusive_ptr<c10d::Store>& store, Communicator& communicator,
    const GroupOptions& options, c10::Device device, std::size_t sum_bytes);

}  // namespace ringcomm
