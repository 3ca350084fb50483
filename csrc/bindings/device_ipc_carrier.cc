#include "bindings/device_ipc_carrier.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "bindings/driver_device.h"
#include "bindings/python_errors.h"
#include "collectives/cuda/unavailable.h"

namespace ringcomm {
namespace {

std::vector<cuda::Mail> to_mails(const std::vector<DeviceMessage>& messages) {
  std::vector<cuda::Mail> mails;
  for (const DeviceMessage& message : messages)
    mails.push_back({.data = static_cast<std::byte*>(message.data),
                     .num_bytes = message.num_bytes,
                     .tag = message.tag,
                     .peer = static_cast<std::int16_t>(message.peer),
                     .is_send = message.is_send});
  return mails;
}

}  // namespace

Traffic IpcDeviceCarrier::enqueue(const Collective& call, const CallHeader& header,
                                  const c10::Stream& stream) {
  return engine_->enqueue(call, header, handle_of(stream));
}

void IpcDeviceCarrier::exchange(const std::vector<DeviceMessage>& messages,
                                const c10::Stream& stream) {
  engine_->exchange(to_mails(messages), handle_of(stream));
}

void IpcDeviceCarrier::check_messages(const std::vector<DeviceMessage>& messages) {
  engine_->check_messages(to_mails(messages));
}

void IpcDeviceCarrier::check_collective(const c10::Stream& stream) const {
  engine_->check_collective(handle_of(stream));
}

DeviceCarrier::LentMemory IpcDeviceCarrier::lend(std::size_t num_bytes) {
  std::shared_ptr<const cuda::DeviceMemory> memory = engine_->lend(num_bytes);
  return {memory->data(), memory};
}

bool IpcDeviceCarrier::is_captured(const c10::Stream& stream) const {
  return engine_->is_captured(handle_of(stream));
}

std::unique_ptr<DeviceCarrier> make_ipc_device_carrier(const DeviceCarrierGroup& group,
                                                       c10::Device device, std::string& reason) {
  if (group.world_size == 1 || !is_of_driver(device)) {
    reason = group.world_size == 1 ? "a group of one" : "not a device of CUDA";
    return nullptr;
  }
  if (group.options.engine.transport == "p2p") {
    reason = "the transport is p2p";
    return nullptr;
  }
  const c10::DeviceGuard guard(device);
  const std::string who = "ringcomm: group " + group.options.group_name;
  try {
    return std::make_unique<IpcDeviceCarrier>(cuda::Engine::make(
        *group.communicator, device.index(), std::min(group.options.timeout, kLongestTimeout),
        [who](const std::string& error) { LOG(ERROR) << who << " has ended: " << error; }));
  } catch (const cuda::Unavailable& unavailable) {
    reason = unavailable.what();
    return nullptr;
  }
}

}  // namespace ringcomm
