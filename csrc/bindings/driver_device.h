#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "transport/cuda/driver_api.h"

// Devices and streams of torch, as CUDA's driver knows them.

namespace ringcomm {

/// Whether the driver has this device: one of CUDA, or of what stands in for its driver.
bool is_of_driver(c10::Device device);

cuda::StreamHandle handle_of(const c10::Stream& stream);

}  // namespace ringcomm
