#include "cuda/collectives/events.h"

namespace ringcomm::cuda {

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

void RunningKernels::remember(const void* group, int peer, std::shared_ptr<const Event> end) {
  const std::lock_guard lock(mutex_);
  ends_[{group, peer}] = std::move(end);
}

void RunningKernels::forget(const void* group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(ends_, [&](const auto& entry) { return entry.first.first == group; });
}

bool RunningKernels::are_messages_over() {
  const std::lock_guard lock(mutex_);
  return are_over([](const void*, int peer) { return peer != kCollective; });
}

bool RunningKernels::is_over_but_of(const void* group) {
  const std::unique_lock none(launching_, std::try_to_lock);
  const std::lock_guard lock(mutex_);
  return none && are_over([&](const void* other, int peer) {
           return other != group || peer != kCollective;
         });
}

bool RunningKernels::if_over(const std::function<void()>& body) {
  const std::unique_lock none(launching_, std::try_to_lock);
  const std::lock_guard lock(mutex_);
  if (!none || !are_over([](const void*, int) { return true; })) return false;
  body();
  return true;
}

bool RunningKernels::are_over(const std::function<bool(const void* group, int peer)>& which) {
  for (auto entry = ends_.begin(); entry != ends_.end();) {
    if (!which(entry->first.first, entry->first.second)) {
      ++entry;
      continue;
    }
    if (!entry->second->is_over()) return false;
    entry = ends_.erase(entry);
  }
  return true;
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

void StreamOrder::remember(std::shared_ptr<const Event> end, const StreamPlace& place) {
  constexpr std::size_t kMostCaptures = 16;
  (place.capture == 0 ? run_ : captured_[place.capture]) = {std::move(end), place.stream};
  if (captured_.size() > kMostCaptures) captured_.erase(captured_.begin());
}

void StreamOrder::synchronize() const {
  if (run_.end != nullptr) check(driver().event_synchronize(run_.end->get()), "wait for the GPU");
}

}  // namespace ringcomm::cuda
