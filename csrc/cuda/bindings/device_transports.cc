#include "cuda/bindings/device_transports.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Logging.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "bindings/python_errors.h"
#include "communicator/records.h"
#include "core/errors.h"
#include "cuda/collectives/ipc_transport.h"

namespace ringcomm {
namespace {

// Null on all ranks, with the reason, if the ranks cannot map each other's memory.
DeviceTransportPtr make_ipc_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                      Communicator& communicator, const GroupOptions& options,
                                      c10::Device device, std::string& reason) {
  if (communicator.world_size() == 1)
    reason = "a group of one";
  else if (!is_of_driver(device))
    reason = "not a CUDA device";
  else if (options.engine.transport == "messages")
    reason = "the transport is messages";
  if (!reason.empty()) return nullptr;
  const std::string name = "ringcomm: group " + options.group_name;
  const WaitLimits limits{.timeout = std::min(options.timeout, kLongestTimeout),
                          .is_interrupted = is_interrupted};
  const auto make_sums = [&]() -> DeviceTransportPtr {
    if (options.engine.algorithm != Algorithm::kAuto || options.engine.is_rank_ordered)
      return nullptr;
    DeviceTransportPtr made;
    try {
      made = make_message_device_transport(store, communicator, options, device,
                                           cuda::kLeastSwitchBytes);
    } catch (const std::exception& error) {
      communicator.failure().rethrow_if_any();
      LOG(WARNING) << name << ": sums stay with ringcomm's kernels: " << error.what();
    }
    const auto all = RecordExchange(communicator, limits).all_gather(std::uint8_t{made != nullptr});
    if (std::ranges::find(all, 0) == all.end()) return made;
    if (made != nullptr) made->abort();
    return nullptr;
  };
  try {
    const cuda::ContextGuard guard(device.index());
    const cuda::RelaxedCapture relaxed;
    return std::make_unique<cuda::IpcTransport>(
        communicator, device.index(), limits,
        [name](const std::string& error) { LOG(ERROR) << name << " failed: " << error; },
        make_sums);
  } catch (const Unavailable& unavailable) {
    reason = unavailable.what();
    return nullptr;
  }
}

}  // namespace

DeviceTransportPtr make_device_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                         Communicator& communicator, const GroupOptions& options,
                                         c10::Device device) {
  const c10::DeviceGuard guard(device);
  // The faster one first; the other takes every group.
  std::string reason;
  DeviceTransportPtr transport = make_ipc_transport(store, communicator, options, device, reason);
  const bool is_slower =
      transport != nullptr
          ? transport->description().find(cuda::kFewQueues) != std::string::npos
          : is_of_driver(device) && communicator.transport_description().starts_with("shm:");
  std::string not_by;
  if (transport == nullptr) {
    not_by = "; not by cuda_ipc: " + reason;
    try {
      transport =
          make_message_device_transport(store, communicator, options, device, /*sum_bytes=*/0);
    } catch (c10::Error& error) {
      error.add_context(not_by.substr(2));
      throw;
    } catch (const Error& error) {
      throw Error(error.info(), error.what() + not_by);
    }
  }
  const pybind11::gil_scoped_acquire acquired;
  static bool has_warned[2] = {};  // with the GIL; of each cause
  const bool warns = is_slower && !std::exchange(has_warned[not_by.empty()], true);
  pybind11::module_::import("logging")
      .attr("getLogger")("ringcomm")
      .attr(warns ? "warning" : "info")("group %s, rank %d of %d: tensors on %s go by %s",
                                        options.group_name, communicator.rank(),
                                        communicator.world_size(), device.str(),
                                        transport->description() + not_by);
  return transport;
}

}  // namespace ringcomm
