#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "bindings/c10d_messages.h"
#include "bindings/python_errors.h"
#include "core/arch.h"
#include "cuda/messages/carrier.h"
#include "transport/wait_limits.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

// Ends the group on all ranks if a rank cannot arrive.
LookForRanks look_for(const DeviceCarrierGroup& group, c10::Device device) {
  const auto deadline = deadline_after(std::min(group.options.timeout, kLongestTimeout));
  return [&group, device, deadline](int missing) {
    Communicator& communicator = *group.communicator;
    const Activity activity{.op = "init",
                            .description = "connecting tensors on " + device.str(),
                            .timeout = group.options.timeout};
    for (int rank = 0; rank < group.world_size; ++rank)
      if (communicator.members()->has_died(rank))
        communicator.failure().raise_stopped(Stop::kPeerDied, rank, activity);
    if (is_interrupted())
      communicator.failure().raise_stopped(Stop::kInterrupted, missing, activity);
    if (std::chrono::steady_clock::now() >= deadline)
      communicator.failure().raise_stopped(Stop::kTimeout, missing, activity);
  };
}

c10::intrusive_ptr<c10d::Backend> make_backend(const DeviceCarrierGroup& group,
                                               c10::Device device) {
  const py::gil_scoped_acquire acquired;
  std::string name;
  try {
    name = py::module_::import("ringcomm.message_backend")
               .attr("for_device")(group.options.engine.p2p_backend,
                                   c10::DeviceTypeName(device.type(), /*lower_case=*/true))
               .cast<std::string>();
  } catch (const py::error_already_set& error) {
    TORCH_CHECK_VALUE(!error.matches(PyExc_ValueError), py::str(error.value()).cast<std::string>());
    throw;
  }
  return make_message_backend(name, group.store, group.rank, group.world_size, group.options,
                              look_for(group, device), "tensors on " + device.str());
}

}  // namespace

std::unique_ptr<DeviceCarrier> make_message_device_carrier(const DeviceCarrierGroup& group,
                                                           c10::Device device) {
  const c10::DeviceGuard guard(device);
  return std::make_unique<MessageDeviceCarrier>(
      group.world_size > 1 ? make_backend(group, device) : nullptr, group, device);
}

}  // namespace ringcomm
