#include "cuda/bindings/device_event.h"

#include <utility>

#include "cuda/bindings/driver_device.h"

namespace ringcomm {

DeviceEvent DeviceEvent::record(const c10::Stream& stream) {
  if (is_of_driver(stream.device()) && cuda::has_driver())
    return DeviceEvent(cuda::EventPool::of(stream.device_index()).record(handle_of(stream)));
  c10::Event event(stream.device_type());
  event.record(stream);
  return DeviceEvent(std::move(event));
}

void DeviceEvent::block(const c10::Stream& stream) const {
  if (of_driver_ != nullptr)
    of_driver_->block(handle_of(stream));
  else
    of_torch_->block(stream);
}

}  // namespace ringcomm
