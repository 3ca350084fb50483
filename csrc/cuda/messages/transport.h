#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/devices.h"
#include "collectives/call.h"
#include "communicator/communicator.h"
#include "cuda/collectives/device_transport.h"

namespace ringcomm {

/// Collectives of device tensors over another backend, which ringcomm.message_backend chooses, for
/// ranks that cannot map each other's memory. Takes every group. Collective over it; takes the GIL.
/// Throws Error, and ValueError if no backend supports the device.
std::unique_ptr<cuda::DeviceTransport> make_message_device_transport(
    const c10::intrusive_ptr<c10d::Store>& store, Communicator& communicator,
    const GroupOptions& options, c10::Device device);

/// Starts to compare a call's header, and the sizes of the shards of each pair, between the hosts:
/// the data has no headers. A difference, or a rank that does not make the call in time, ends the
/// group. `done` is called from another thread, with whether that has happened.
void check_header(Communicator& communicator, const Collective& call,
                  std::chrono::milliseconds timeout, std::function<void(bool)> done);

}  // namespace ringcomm
