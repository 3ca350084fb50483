#include "cuda/collectives/events.h"

#include <utility>

namespace ringcomm::cuda {

Event::Event() { check(driver().event_create(&event_, kEventDisableTiming), "make an event"); }

Event::~Event() { driver().event_destroy(event_); }

void Event::record(StreamHandle stream) {
  check(driver().event_record(event_, stream), "record an event");
}

void Event::block(StreamHandle stream) const {
  check(driver().stream_wait_event(stream, event_, 0), "make a stream wait for an event");
}

bool Event::is_over() const {
  const Result result = driver().event_query(event_);
  if (result != kErrorNotReady) check(result, "ask whether an event is over");
  return result == kSuccess;
}

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

namespace {

class SideStream {
 public:
  SideStream() { check(driver().stream_create(&stream_, kStreamNonBlocking), "make a stream"); }
  ~SideStream() { driver().stream_destroy(stream_); }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  StreamHandle get() const { return stream_; }
  void finish() const { check(driver().stream_synchronize(stream_), "wait for the GPU"); }

 private:
  StreamHandle stream_ = nullptr;
};

DevicePtr address(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

}  // namespace

void copy_and_wait(void* to, const void* from, std::size_t num_bytes, const char* what) {
  const SideStream stream;
  check(driver().memcpy_async(address(to), address(from), num_bytes, stream.get()), what);
  stream.finish();
}

void clear_and_wait(void* begin, std::size_t num_bytes, const char* what) {
  const SideStream stream;
  check(driver().memset_d8_async(address(begin), 0, num_bytes, stream.get()), what);
  stream.finish();
}

std::uint64_t capture_of(StreamHandle stream) {
  int status = kCaptureNone;
  unsigned long long id = 0;
  check(driver().stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
        "ask a stream whether it is captured");
  // One that is broken has no number any more.
  constexpr std::uint64_t kBroken = ~std::uint64_t{0};
  return status == kCaptureNone ? 0 : status == kCaptureActive ? id : kBroken;
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
