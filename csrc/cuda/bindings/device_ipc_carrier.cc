#include "cuda/bindings/device_ipc_carrier.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "bindings/python_errors.h"
#include "cuda/bindings/driver_device.h"

namespace ringcomm {
namespace {

std::vector<cuda::P2pMessage> to_p2p(const std::vector<DeviceMessage>& messages) {
  std::vector<cuda::P2pMessage> p2p;
  for (const DeviceMessage& message : messages)
    p2p.push_back({.data = static_cast<std::byte*>(message.data),
                   .num_bytes = message.num_bytes,
                   .tag = message.tag,
                   .peer = static_cast<std::int16_t>(message.peer),
                   .is_send = message.is_send});
  return p2p;
}

cuda::StreamPlace to_place(const DevicePlace& place) {
  return {.stream = handle_of(place.stream), .capture = place.capture};
}

SharedDeviceMemory to_memory(std::shared_ptr<const cuda::Loan> loan) {
  return {loan->data(), [loan](const std::vector<c10::Stream>& streams) {
            std::vector<cuda::StreamHandle> handles;
            for (const c10::Stream& stream : streams) handles.push_back(handle_of(stream));
            loan->give_back(handles);
          }};
}

}  // namespace

Traffic IpcDeviceCarrier::enqueue(const Collective& call, const CallHeader& header,
                                  const DevicePlace& place) {
  return engine_->enqueue(call, header, to_place(place));
}

void IpcDeviceCarrier::exchange(const std::vector<DeviceMessage>& messages,
                                const DevicePlace& place) {
  engine_->exchange(to_p2p(messages), to_place(place));
}

void IpcDeviceCarrier::check_messages(const std::vector<DeviceMessage>& messages) {
  engine_->check_messages(to_p2p(messages));
}

void IpcDeviceCarrier::check_collective(const DevicePlace& place) const {
  engine_->check_collective(to_place(place));
}

SharedDeviceMemory IpcDeviceCarrier::lend(std::size_t num_bytes) {
  return to_memory(engine_->lend(num_bytes));
}

SharedDeviceMemory IpcDeviceCarrier::borrow(std::size_t num_bytes, const DevicePlace& place) {
  std::shared_ptr<const cuda::Loan> loan = engine_->borrow(num_bytes, to_place(place));
  return loan != nullptr ? to_memory(std::move(loan)) : SharedDeviceMemory{};
}

std::unique_ptr<DeviceCarrier> make_ipc_device_carrier(const DeviceCarrierGroup& group,
                                                       c10::Device device, std::string& reason) {
  if (group.world_size == 1 || !is_of_driver(device)) {
    reason = group.world_size == 1 ? "a group of one" : "not a CUDA device";
    return nullptr;
  }
  if (group.options.engine.transport == "p2p") {
    reason = "the transport is p2p";
    return nullptr;
  }
  const c10::DeviceGuard guard(device);
  const std::string name = "ringcomm: group " + group.options.group_name;
  try {
    return std::make_unique<IpcDeviceCarrier>(cuda::Engine::make(
        *group.communicator, device.index(),
        {.timeout = std::min(group.options.timeout, kLongestTimeout),
         .is_interrupted = is_interrupted},
        [name](const std::string& error) { LOG(ERROR) << name << " failed: " << error; }));
  } catch (const cuda::Unavailable& unavailable) {
    reason = unavailable.what();
    return nullptr;
  }
}

}  // namespace ringcomm
