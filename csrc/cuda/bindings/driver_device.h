#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "cuda/driver/driver.h"

// Devices and streams of torch, as CUDA's driver knows them.

namespace ringcomm {

/// Whether this is a device of the driver: CUDA, or an emulator of its driver.
bool is_of_driver(c10::Device device);

cuda::StreamHandle handle_of(const c10::Stream& stream);

/// Makes the context of a device of the driver current while it lives; does nothing for others.
class DeviceContext {
 public:
  explicit DeviceContext(c10::Device device) {
    if (is_of_driver(device) && cuda::has_driver()) guard_.emplace(device.index());
  }

 private:
  std::optional<cuda::ContextGuard> guard_;
};

/// The place of one enqueued call: a stream, and the driver's capture that the stream is part of; 0
/// if none.
struct DevicePlace {
  c10::Stream stream;
  std::uint64_t capture = 0;

  /// With the DeviceContext of the stream's device.
  static DevicePlace of(const c10::Stream& stream);
  bool is_captured() const { return capture != 0; }
};

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
