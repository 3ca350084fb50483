#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "cuda/collectives/events.h"
#include "cuda/driver/driver.h"

// Devices, streams and events of torch, as CUDA's driver knows them.

namespace ringcomm {

/// Whether this is a device of the driver: CUDA, or an emulator of its driver.
bool is_of_driver(c10::Device device);
/// The same, where there is a driver.
bool has_driver_for(c10::Device device);

cuda::StreamHandle handle_of(const c10::Stream& stream);
/// Of a device of the driver; empty for others. With the DeviceContext of the stream's device.
cuda::StreamPlace place_of(const c10::Stream& stream);

/// Makes the context of a device of the driver current while it lives; does nothing for others.
class DeviceContext {
 public:
  explicit DeviceContext(c10::Device device) {
    if (has_driver_for(device)) guard_.emplace(device.index());
  }

 private:
  std::optional<cuda::ContextGuard> guard_;
};

/// A point in a device's stream: an event of cuda::EventPool for devices of the driver, and a torch
/// event for others.
class DeviceEvent {
 public:
  /// Records an event after the work that the stream holds now. With the DeviceContext of its
  /// device.
  static DeviceEvent record(const c10::Stream& stream);
  /// One that the engine of a device of the driver has recorded.
  explicit DeviceEvent(std::shared_ptr<const cuda::Event> event) : of_driver_(std::move(event)) {}

  /// Makes a stream wait. With the DeviceContext of its device.
  void block(const c10::Stream& stream) const;
  /// Whether the stream has passed it; not for one that was recorded in a capture. Other streams
  /// may be captured meanwhile, by this thread or another.
  bool is_over() const;

 private:
  explicit DeviceEvent(c10::Event event) : of_torch_(std::move(event)) {}

  std::shared_ptr<const cuda::Event> of_driver_;
  std::optional<c10::Event> of_torch_;  // where the other is null
};

}  // namespace ringcomm
