#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

#include "transport/cuda/driver.h"

// Devices and streams of torch, as CUDA's driver knows them.

namespace ringcomm {

/// Whether the driver has this device: one of CUDA, or of what stands in for its driver.
bool is_of_driver(c10::Device device);

cuda::StreamHandle handle_of(const c10::Stream& stream);

/// While it lives, this thread may query events of the device although a stream is being captured,
/// by this thread or another: a query in the default mode would invalidate that capture. For events
/// that were not recorded in a capture.
class QueriesInCaptures {
 public:
  explicit QueriesInCaptures(c10::Device device) {
    if (is_of_driver(device) && cuda::has_driver()) relaxed_.emplace();
  }

 private:
  std::optional<cuda::RelaxedCapture> relaxed_;
};

}  // namespace ringcomm
