#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>

#include "bindings/python_errors.h"
#include "core/errors.h"
#include "cuda/bindings/device_group.h"
#include "cuda/bindings/driver_device.h"
#include "cuda/collectives/engine.h"
#include "cuda/messages/carrier.h"

namespace ringcomm {
namespace {

using CarrierPtr = std::unique_ptr<cuda::DeviceCarrier>;

// Null on all ranks, with the reason, if the ranks cannot map each other's memory.
CarrierPtr make_engine(Communicator& communicator, const GroupOptions& options, c10::Device device,
                       std::string& reason) {
  if (communicator.world_size() == 1)
    reason = "a group of one";
  else if (!is_of_driver(device))
    reason = "not a CUDA device";
  else if (options.engine.transport == "p2p")
    reason = "the transport is p2p";
  if (!reason.empty()) return nullptr;
  const std::string name = "ringcomm: group " + options.group_name;
  try {
    return cuda::Engine::make(
        communicator, device.index(),
        {.timeout = std::min(options.timeout, kLongestTimeout), .is_interrupted = is_interrupted},
        [name](const std::string& error) { LOG(ERROR) << name << " failed: " << error; });
  } catch (const cuda::Unavailable& unavailable) {
    reason = unavailable.what();
    return nullptr;
  }
}

}  // namespace

CarrierPtr DeviceGroup::make_carrier(Communicator& communicator, c10::Device device) const {
  const c10::DeviceGuard guard(device);
  // The faster one first; the other takes every group.
  std::string reason;
  CarrierPtr carrier = make_engine(communicator, *options_, device, reason);
  std::string not_by;
  if (carrier == nullptr) {
    not_by = "not by cuda_ipc: " + reason;
    try {
      carrier = make_message_device_carrier(store_, communicator, *options_, device);
    } catch (c10::Error& error) {
      error.add_context(not_by);
      throw;
    } catch (const Error& error) {
      throw Error(error.info(), std::string(error.what()) + "; " + not_by);
    }
    not_by = "; " + not_by;
  }
  const pybind11::gil_scoped_acquire acquired;
  pybind11::module_::import("logging")
      .attr("getLogger")("ringcomm")
      .attr("info")("group %s, rank %d of %d: tensors on %s go by %s", options_->group_name,
                    communicator.rank(), communicator.world_size(), device.str(),
                    carrier->description() + not_by);
  return carrier;
}

}  // namespace ringcomm
