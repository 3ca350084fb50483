#include "cuda/bindings/device_carrier.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include "core/errors.h"
#include "cuda/bindings/device_ipc_carrier.h"
#include "cuda/messages/carrier.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

void log_choice(const DeviceCarrierGroup& group, c10::Device device, const std::string& name) {
  const py::gil_scoped_acquire acquired;
  py::module_::import("logging")
      .attr("getLogger")("ringcomm")
      .attr("info")("group %s, rank %d of %d: tensors on %s go by %s", group.options.group_name,
                    group.rank, group.world_size, device.str(), name);
}

}  // namespace

SharedDeviceMemory DeviceCarrier::lend(std::size_t) {
  C10_THROW_ERROR(
      NotImplementedError,
      "ringcomm: ranks that reach each other by " + name() +
          " share no memory; use torch.empty instead: calls on it are sent as messages");
}

std::unique_ptr<DeviceCarrier> make_device_carrier(const DeviceCarrierGroup& group,
                                                   c10::Device device) {
  // The faster one first; the other takes every group.
  std::string reason;
  std::unique_ptr<DeviceCarrier> carrier = make_ipc_device_carrier(group, device, reason);
  if (carrier != nullptr) {
    log_choice(group, device, carrier->name());
    return carrier;
  }
  const std::string not_by = "not by cuda_ipc: " + reason;
  try {
    carrier = make_message_device_carrier(group, device);
  } catch (c10::Error& error) {
    error.add_context(not_by);
    throw;
  } catch (const Error& error) {
    throw Error(error.info(), std::string(error.what()) + "; " + not_by);
  }
  log_choice(group, device, carrier->name() + "; " + not_by);
  return carrier;
}

}  // namespace ringcomm
