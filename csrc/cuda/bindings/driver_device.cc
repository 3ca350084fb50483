#include "cuda/bindings/driver_device.h"

#include <cstdlib>
#include <utility>

namespace ringcomm {

bool is_of_driver(c10::Device device) {
  const char* driver = std::getenv("RINGCOMM_CUDA_DRIVER");
  return device.is_cuda() || (device.is_privateuseone() && driver != nullptr && *driver != '\0');
}

bool has_driver_for(c10::Device device) { return is_of_driver(device) && cuda::has_driver(); }

cuda::StreamHandle handle_of(const c10::Stream& stream) {
  return static_cast<cuda::StreamHandle>(stream.native_handle());
}

cuda::StreamPlace place_of(const c10::Stream& stream) {
  if (!has_driver_for(stream.device())) return {};
  return cuda::StreamPlace::of(handle_of(stream));
}

DeviceEvent DeviceEvent::record(const c10::Stream& stream) {
  if (has_driver_for(stream.device()))
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

bool DeviceEvent::is_over() const {
  if (of_driver_ == nullptr) return of_torch_->query();
  // In the default mode a query would invalidate the captures of other streams.
  const cuda::RelaxedCapture relaxed;
  return of_driver_->is_over();
}

}  // namespace ringcomm
