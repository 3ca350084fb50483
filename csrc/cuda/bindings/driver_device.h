#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <utility>

#include "cuda/collectives/events.h"
#include "cuda/driver/driver.h"
#include "kernels/cuda_device.h"

// Devices, streams and events of torch, as CUDA's driver knows them.

namespace ringcomm {

/// Of a device of the driver; empty for others. With the DeviceContext of the stream's device.
inline cuda::StreamPlace place_of(const c10::Stream& stream) {
  if (!has_driver_for(stream.device())) return {};
  return cuda::StreamPlace::of(handle_of(stream));
}

/// Makes the context of a device of the driver current while it lives; does nothing for others.
class DeviceContext {
 public:
  explicit DeviceContext(c10::Device device) {
    if (has_driver_for(device)) guard_.emplace(device.index());
  }

 private:
  std::optional<cuda::ContextGuard> guard_;
};

/// A point in a device's stream: of cuda::EventPool, or of torch for devices without the driver.
class DeviceEvent {
 public:
  /// After the work that the stream holds now. With the DeviceContext of its device.
  static DeviceEvent record(const c10::Stream& stream) {
    if (has_driver_for(stream.device()))
      return DeviceEvent(cuda::EventPool::of(stream.device_index()).record(handle_of(stream)));
    c10::Event event(stream.device_type());
    event.record(stream);
    return DeviceEvent(std::move(event));
  }
  /// One that the engine of a device of the driver has recorded.
  explicit DeviceEvent(std::shared_ptr<const cuda::Event> event) : of_driver_(std::move(event)) {}

  /// Makes a stream wait. With the DeviceContext of its device.
  void block(const c10::Stream& stream) const {
    of_driver_ != nullptr ? of_driver_->block(handle_of(stream)) : of_torch_->block(stream);
  }
  /// Whether the stream has passed it, which is not captured; other streams may be.
  bool is_over() const {
    if (of_driver_ == nullptr) return of_torch_->query();
    const cuda::RelaxedCapture relaxed;
    return of_driver_->is_over();
  }

 private:
  explicit DeviceEvent(c10::Event event) : of_torch_(std::move(event)) {}

  std::shared_ptr<const cuda::Event> of_driver_;
  std::optional<c10::Event> of_torch_;  // where the other is null
};

}  // namespace ringcomm
