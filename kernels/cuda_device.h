#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdlib>

#include "cuda/driver/driver.h"

// Devices and streams of torch, as CUDA's driver knows them.

namespace ringcomm {

/// Whether this is a device of the driver: CUDA, or an emulator of its driver.
inline bool is_of_driver(c10::Device device) {
  const char* driver = std::getenv("RINGCOMM_CUDA_DRIVER");
  return device.is_cuda() || (device.is_privateuseone() && driver != nullptr && *driver != '\0');
}
/// The same, where there is a driver.
inline bool has_driver_for(c10::Device device) {
  return is_of_driver(device) && cuda::has_driver();
}

inline cuda::StreamHandle handle_of(const c10::Stream& stream) {
  return static_cast<cuda::StreamHandle>(stream.native_handle());
}

}  // namespace ringcomm
