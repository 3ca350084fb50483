#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "bindings/device_messages/carrier.h"
#include "core/errors.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

// What is late ringcomm's hosts find first, and say which rank it is; the backend may end the
// process.
constexpr std::chrono::seconds kGrace{60};

c10::intrusive_ptr<c10d::Backend> make_backend(const DeviceCarrierGroup& group,
                                               c10::Device device) {
  const py::gil_scoped_acquire acquired;
  const GroupOptions& options = group.options;
  const py::module_ module = py::module_::import("ringcomm.message_backend");
  py::object name;
  try {
    name = module.attr("for_device")(options.engine.p2p_backend,
                                     c10::DeviceTypeName(device.type(), /*lower_case=*/true));
  } catch (const py::error_already_set& error) {
    TORCH_CHECK_VALUE(!error.matches(PyExc_ValueError), py::str(error.value()).cast<std::string>());
    throw;
  }
  try {
    return module
        .attr("make")(name, group.store, group.rank, group.world_size,
                      std::min(options.timeout, kLongestTimeout) + kGrace, options.group_name,
                      options.global_ranks_in_group)
        .cast<c10::intrusive_ptr<c10d::Backend>>();
  } catch (const std::exception& error) {
    throw Error({.kind = ErrorKind::kSystem, .rank = group.rank, .op = "init"},
                "ringcomm: " + name.cast<std::string>() + ", which was to carry tensors on " +
                    device.str() + ", could not be made: " + error.what());
  }
}

}  // namespace

std::unique_ptr<DeviceCarrier> make_message_device_carrier(const DeviceCarrierGroup& group,
                                                           c10::Device device) {
  const c10::DeviceGuard guard(device);
  return std::make_unique<MessageDeviceCarrier>(
      group.world_size > 1 ? make_backend(group, device) : nullptr, group, device);
}

}  // namespace ringcomm
