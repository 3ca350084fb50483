#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "cuda/collectives/events.h"

namespace ringcomm {

/// A point in a device's stream: an event of cuda::EventPool for devices of the driver, and a torch
/// event for others.
class DeviceEvent {
 public:
  /// Records an event after the work that the stream holds now. Needs the DeviceContext of its
  /// device.
  static DeviceEvent record(const c10::Stream& stream);
  /// One that the engine of a device of the driver has recorded.
  explicit DeviceEvent(std::shared_ptr<const cuda::Event> event) : of_driver_(std::move(event)) {}

  /// Makes a stream wait. With the DeviceContext of its device.
  void block(const c10::Stream& stream) const;
  /// Whether the stream has passed it. With QueriesInCaptures.
  bool is_over() const {
    return of_driver_ != nullptr ? of_driver_->is_over() : of_torch_->query();
  }

 private:
  explicit DeviceEvent(c10::Event event) : of_torch_(std::move(event)) {}

  std::shared_ptr<const cuda::Event> of_driver_;
  std::optional<c10::Event> of_torch_;  // where the other is null
};

}  // namespace ringcomm
