#include "bindings/device_carrier.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/device_messages/carrier.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

/// Null, on all ranks alike, where this kind of carrier does not reach them all.
using MakeCarrier = std::unique_ptr<DeviceCarrier> (*)(const DeviceCarrierGroup&, c10::Device);

// The best one first; the last takes every group.
constexpr MakeCarrier kCarriers[] = {make_message_device_carrier};

void log_choice(const DeviceCarrierGroup& group, c10::Device device, const std::string& name) {
  const py::gil_scoped_acquire acquired;
  py::module_::import("logging")
      .attr("getLogger")("ringcomm")
      .attr("info")("group %s, rank %d of %d: tensors on %s go by %s", group.options.group_name,
                    group.rank, group.world_size, device.str(), name);
}

}  // namespace

std::unique_ptr<DeviceCarrier> make_device_carrier(const DeviceCarrierGroup& group,
                                                   c10::Device device) {
  for (const MakeCarrier make : kCarriers) {
    std::unique_ptr<DeviceCarrier> carrier = make(group, device);
    if (carrier == nullptr) continue;
    log_choice(group, device, carrier->name());
    return carrier;
  }
  TORCH_CHECK_VALUE(false, "ringcomm: nothing carries tensors on ", device);
}

}  // namespace ringcomm
