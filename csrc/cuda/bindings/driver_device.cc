#include "cuda/bindings/driver_device.h"

#include <cstdlib>

#include "cuda/collectives/events.h"

namespace ringcomm {

bool is_of_driver(c10::Device device) {
  const char* driver = std::getenv("RINGCOMM_CUDA_DRIVER");
  return device.is_cuda() || (device.is_privateuseone() && driver != nullptr && *driver != '\0');
}

cuda::StreamHandle handle_of(const c10::Stream& stream) {
  return static_cast<cuda::StreamHandle>(stream.native_handle());
}

DevicePlace DevicePlace::of(const c10::Stream& stream) {
  const bool is_known = is_of_driver(stream.device()) && cuda::has_driver();
  return {.stream = stream, .capture = is_known ? cuda::capture_of(handle_of(stream)) : 0};
}

}  // namespace ringcomm
