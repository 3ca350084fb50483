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
  if (event == nullptr) event = std::make_unique<Event>(device_);
  event->record(stream);
  return {event.release(), [this](Event* used) {
            const std::lock_guard lock(mutex_);
            free_.emplace_back(used);
          }};
}

void RunningKernels::wait(const void* group, int peer, const StreamContext& stream) {
  const std::lock_guard lock(mutex_);
  const Order& order = orders_[{group, peer}];
  const auto found = order.captured.find(stream.capture);
  if (stream.capture != 0 && found == order.captured.end()) return;
  const Last& last = stream.capture == 0 ? order.run : found->second;
  if (last.end != nullptr && last.stream != stream.handle) last.end->block(stream.handle);
}

void RunningKernels::remember(const void* group, int peer, std::shared_ptr<const Event> end,
                              const StreamContext& stream) {
  constexpr std::size_t kMostCaptures = 16;
  const std::lock_guard lock(mutex_);
  auto& [run, captured] = orders_[{group, peer}];
  (stream.capture == 0 ? run : captured[stream.capture]) = {std::move(end), stream.handle};
  if (captured.size() > kMostCaptures) captured.erase(captured.begin());
}

void RunningKernels::end(const void* group) {
  std::vector<std::shared_ptr<const Event>> ends;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, order] : orders_)
      if (key.first == group && order.run.end != nullptr) ends.push_back(order.run.end);
  }
  for (const auto& end : ends) end->synchronize();
  const std::lock_guard lock(mutex_);
  std::erase_if(orders_, [&](const auto& entry) { return entry.first.first == group; });
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
  if (!none || !are_over([](const void*, int) { return true; }, false)) return false;
  body();
  return true;
}

bool RunningKernels::are_over(const std::function<bool(const void* group, int peer)>& which,
                              bool may_record) {
  for (auto& [key, order] : orders_) {
    if (order.run.end == nullptr || !which(key.first, key.second)) continue;
    if (!order.run.end->is_over(may_record)) return false;
    order.run.end = nullptr;
  }
  return true;
}

void run_and_wait(const std::function<void(StreamHandle)>& enqueue, const char* what) {
  StreamHandle stream = nullptr;
  check(driver().stream_create(&stream, kStreamNonBlocking), "make a stream");
  const std::unique_ptr<StreamTag, Result (*)(StreamHandle)> owner(stream, driver().stream_destroy);
  enqueue(stream);
  check(driver().stream_synchronize(stream), what);
}

void copy_and_wait(void* to, const void* from, std::size_t num_bytes, const char* what) {
  const auto address = [](const void* data) { return reinterpret_cast<DevicePtr>(data); };
  run_and_wait(
      [&](StreamHandle stream) {
        check(from != nullptr ? driver().memcpy_async(address(to), address(from), num_bytes, stream)
                              : driver().memset_d8_async(address(to), 0, num_bytes, stream),
              what);
      },
      what);
}

StreamContext StreamContext::of(StreamHandle stream) {
  int status = kCaptureNone;
  unsigned long long id = 0;
  check(driver().stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
        "ask a stream whether it is captured");
  if (status == kCaptureNone) return {stream, 0};
  return {stream, status == kCaptureActive ? id : kFailedCapture};
}

}  // namespace ringcomm::cuda
