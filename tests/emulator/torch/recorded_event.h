#pragma once

#include <utility>

#include "transport/cuda/driver.h"

namespace ringcomm::emulator {

/// An event at the end of what a stream has been given so far.
class RecordedEvent {
 public:
  RecordedEvent(cuda::DeviceOrdinal device, cuda::StreamHandle stream) {
    const cuda::ContextGuard context(device);
    cuda::check(cuda::driver().event_create(&event_, cuda::kEventDisableTiming), "make an event");
    cuda::check(cuda::driver().event_record(event_, stream), "record an event");
  }
  RecordedEvent(RecordedEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  RecordedEvent& operator=(RecordedEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~RecordedEvent() {
    if (event_ != nullptr) cuda::driver().event_destroy(event_);
  }

  bool has_happened() const {
    const cuda::Result result = cuda::driver().event_query(event_);
    if (result != cuda::kErrorNotReady) cuda::check(result, "ask whether an event has happened");
    return result == cuda::kSuccess;
  }
  /// Makes a stream of this device wait for it.
  void block(cuda::DeviceOrdinal device, cuda::StreamHandle stream) const {
    const cuda::ContextGuard context(device);
    cuda::check(cuda::driver().stream_wait_event(stream, event_, 0), "let a stream wait");
  }

 private:
  cuda::EventHandle event_ = nullptr;
};

}  // namespace ringcomm::emulator
