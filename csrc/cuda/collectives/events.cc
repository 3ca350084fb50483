#include "cuda/collectives/events.h"

#include <utility>

namespace ringcomm::cuda {

EventPool& EventPool::of(DeviceOrdinal device) {
  return per_device<EventPool>(device, [] { return std::unique_ptr<EventPool>(new EventPool); });
}

std::shared_ptr<Event> EventPool::record(StreamHandle stream) {
  std::unique_ptr<Event> event;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (event == nullptr) event = std::make_unique<Event>();
  event->record(stream);
  return {event.release(), [this](Event* used) {
            const std::lock_guard lock(mutex_);
            free_.emplace_back(used);
          }};
}

void copy_and_wait(void* to, const void* from, std::size_t num_bytes, const char* what) {
  const auto address = [](const void* data) { return reinterpret_cast<DevicePtr>(data); };
  StreamHandle stream = nullptr;
  check(driver().stream_create(&stream, kStreamNonBlocking), "make a stream");
  Result result = from != nullptr
                      ? driver().memcpy_async(address(to), address(from), num_bytes, stream)
                      : driver().memset_d8_async(address(to), 0, num_bytes, stream);
  if (result == kSuccess) result = driver().stream_synchronize(stream);
  driver().stream_destroy(stream);
  check(result, what);
}

std::uint64_t capture_of(StreamHandle stream) {
  int status = kCaptureNone;
  unsigned long long id = 0;
  check(driver().stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
        "ask a stream whether it is captured");
  return status == kCaptureNone ? 0 : status == kCaptureActive ? id : kFailedCapture;
}

void StreamOrder::wait(const StreamPlace& place) const {
  const auto found = captured_.find(place.capture);
  if (place.capture != 0 && found == captured_.end()) return;
  const Last& last = place.capture == 0 ? run_ : found->second;
  if (last.end != nullptr && last.stream != place.stream) last.end->block(place.stream);
}

void StreamOrder::note(std::shared_ptr<const Event> end, const StreamPlace& place) {
  constexpr std::size_t kMostCaptures = 16;
  (place.capture == 0 ? run_ : captured_[place.capture]) = {std::move(end), place.stream};
  if (captured_.size() > kMostCaptures) captured_.erase(captured_.begin());
}

void StreamOrder::synchronize() const {
  if (run_.end != nullptr) check(driver().event_synchronize(run_.end->get()), "wait for the GPU");
}

}  // namespace ringcomm::cuda
