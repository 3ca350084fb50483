// Streams and events.
#include "emulator/stream.h"

#include <chrono>
#include <map>
#include <random>
#include <utility>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

/// For the next stream of a device.
std::shared_ptr<HardwareQueue> next_queue(DeviceOrdinal device) {
  const auto num_queues = static_cast<std::size_t>(settings().num_queues);
  if (num_queues == 0) return std::make_shared<HardwareQueue>();
  static auto& mutex = *new std::mutex();
  static auto& all = *new std::map<DeviceOrdinal, std::deque<std::shared_ptr<HardwareQueue>>>();
  const std::lock_guard lock(mutex);
  auto& queues = all[device];
  queues.push_back(queues.size() < num_queues ? std::make_shared<HardwareQueue>()
                                              : queues[queues.size() - num_queues]);
  return queues.back();
}

}  // namespace

Result find_stream(StreamHandle handle, std::shared_ptr<StreamTag>* stream) {
  RINGCOMM_GET(Context, context, require_context(&context));
  if (handle == nullptr) {
    const std::lock_guard lock(context->mutex);
    if (context->null_stream == nullptr)
      context->null_stream = Handles<StreamTag>::all().add(std::make_shared<StreamTag>(context));
    handle = context->null_stream;
  }
  *stream = Handles<StreamTag>::all().find(handle);
  return *stream != nullptr ? kSuccess : kInvalidHandle;
}

void synchronize_context(Context context) {
  for (const std::shared_ptr<StreamTag>& stream : Handles<StreamTag>::all().list())
    if (stream->context == context) stream->synchronize();
}

}  // namespace ringcomm::emulator

namespace ringcomm::cuda {
namespace {

unsigned next_number() {
  static std::atomic<unsigned> next = 0;
  return next++;
}

}  // namespace

StreamTag::StreamTag(Context of)
    : context(of), hardware_(emulator::next_queue(of->device)), number_(next_number()) {}

void StreamTag::enqueue(std::function<void()> work, bool is_wait) {
  const std::lock_guard lock(mutex_);
  queue_.push_back({std::move(work), is_wait, hardware_->num_taken++});
  ++num_enqueued_;
  has_news_.notify_all();
  if (has_thread_) return;
  has_thread_ = true;
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void StreamTag::synchronize() {
  std::unique_lock lock(mutex_);
  has_news_.wait(lock, [this, last = num_enqueued_] { return num_done_ >= last; });
}

bool StreamTag::is_idle() {
  const std::lock_guard lock(mutex_);
  return num_done_ == num_enqueued_;
}

void StreamTag::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  has_news_.notify_all();
}

void StreamTag::run() {
  std::seed_seq seed{static_cast<unsigned>(emulator::settings().seed), number_};
  std::minstd_rand random(seed);
  std::uniform_int_distribution<int> delay(0, emulator::settings().max_delay_us);
  std::unique_lock lock(mutex_);
  for (;;) {
    has_news_.wait(lock, [this] { return !queue_.empty() || is_closed_; });
    if (queue_.empty()) return;
    {
      const Item item = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (delay.max() > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay(random)));
      hardware_->wait_for_turn(item.ticket);
      if (!item.is_wait) hardware_->pass_on();
      item.work();
      if (item.is_wait) hardware_->pass_on();
    }
    lock.lock();
    ++num_done_;
    has_news_.notify_all();
  }
}

/// All of it is guarded by capture_mutex().
struct EventTag {
  Context context = nullptr;
  std::shared_ptr<std::atomic_flag> last = {};  // set once the last record is reached; or none made
  // The capture in which it was recorded last, and its dependencies there.
  std::shared_ptr<emulator::Capture> capture = {};
  std::vector<std::size_t> after = {};
};

}  // namespace ringcomm::cuda

namespace ringcomm::emulator {
namespace {

Result find_event(EventHandle handle, std::shared_ptr<EventTag>* event) {
  RINGCOMM_TRY(require_initialized());
  *event = Handles<EventTag>::all().find(handle);
  return *event != nullptr ? kSuccess : kInvalidHandle;
}

/// The event's last record, for the host to look at; null if there is none.
Result find_record(EventHandle handle, std::shared_ptr<std::atomic_flag>* last) {
  RINGCOMM_GET(std::shared_ptr<EventTag>, event, find_event(handle, &event));
  {
    const std::lock_guard lock(capture_mutex());
    if (event->capture != nullptr) return event->capture->spoil(kCapturedEvent);
    *last = event->last;
  }
  return check_unsafe_call();
}

/// Makes the stream part of the capture that the event was recorded in.
Result join(StreamTag& stream, const EventTag& event) {
  if (event.capture->has_ended) return kCapturedEvent;
  if (event.capture->is_invalidated) return kCaptureWasInvalidated;
  if (stream.capture != nullptr && stream.capture != event.capture) {
    stream.capture->is_invalidated = true;
    return event.capture->spoil(kCaptureMerge);
  }
  if (stream.capture == nullptr) {
    if (stream.context->null_stream == &stream) return event.capture->spoil(kCaptureImplicit);
    stream.capture = event.capture;
    stream.capture->streams.push_back(stream.weak_from_this());
  }
  stream.tails.insert(stream.tails.end(), event.after.begin(), event.after.end());
  return kSuccess;
}

}  // namespace

Result api::ctx_synchronize() {
  RINGCOMM_GET(Context, context, require_context(&context));
  RINGCOMM_TRY(check_unsafe_call());
  synchronize_context(context);
  return kSuccess;
}

Result api::stream_create(StreamHandle* stream, unsigned flags) {
  RINGCOMM_GET(Context, context, require_context(&context));
  if (flags != kStreamNonBlocking) return kNotSupported;
  *stream = Handles<StreamTag>::all().add(std::make_shared<StreamTag>(context));
  return kSuccess;
}

Result api::stream_destroy(StreamHandle stream) {
  RINGCOMM_TRY(require_initialized());
  const std::shared_ptr<StreamTag> removed = Handles<StreamTag>::all().remove(stream);
  if (removed == nullptr) return kInvalidHandle;
  const std::lock_guard lock(capture_mutex());
  if (removed->capture != nullptr) removed->capture->is_invalidated = true;
  removed->close();
  return kSuccess;
}

Result api::stream_synchronize(StreamHandle handle) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  RINGCOMM_TRY(check_unsafe_call(stream.get()));
  stream->synchronize();
  return kSuccess;
}

Result api::stream_query(StreamHandle handle) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  RINGCOMM_TRY(check_unsafe_call(stream.get()));
  return stream->is_idle() ? kSuccess : kErrorNotReady;
}

Result api::launch_host_func(StreamHandle handle, void (*function)(void*), void* data) {
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(handle, &stream));
  return submit(*stream, [=] { function(data); });
}

Result api::event_create(EventHandle* event, unsigned flags) {
  RINGCOMM_GET(Context, context, require_context(&context));
  if ((flags & ~kEventDisableTiming) != 0) return kNotSupported;
  *event = Handles<EventTag>::all().add(std::make_shared<EventTag>(context));
  return kSuccess;
}

Result api::event_destroy(EventHandle event) {
  RINGCOMM_TRY(require_initialized());
  return Handles<EventTag>::all().remove(event) != nullptr ? kSuccess : kInvalidHandle;
}

Result api::event_record(EventHandle handle, StreamHandle stream_handle) {
  std::shared_ptr<EventTag> event;
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(stream_handle, &stream));
  RINGCOMM_TRY(find_event(handle, &event));
  if (event->context != stream->context) return kInvalidHandle;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture != nullptr && stream->capture->is_invalidated) return kCaptureWasInvalidated;
  event->capture = stream->capture;
  event->after = stream->tails;
  if (stream->capture != nullptr) return kSuccess;
  event->last = std::make_shared<std::atomic_flag>();
  stream->enqueue([record = event->last] {
    record->test_and_set();
    record->notify_all();
  });
  return kSuccess;
}

Result api::event_query(EventHandle handle) {
  RINGCOMM_GET(std::shared_ptr<std::atomic_flag>, last, find_record(handle, &last));
  return last == nullptr || last->test() ? kSuccess : kErrorNotReady;
}

Result api::event_synchronize(EventHandle handle) {
  RINGCOMM_GET(std::shared_ptr<std::atomic_flag>, last, find_record(handle, &last));
  if (last != nullptr) last->wait(false);
  return kSuccess;
}

Result api::stream_wait_event(StreamHandle stream_handle, EventHandle handle, unsigned flags) {
  std::shared_ptr<EventTag> event;
  RINGCOMM_GET(std::shared_ptr<StreamTag>, stream, find_stream(stream_handle, &stream));
  RINGCOMM_TRY(find_event(handle, &event));
  if (flags != 0) return kInvalidValue;
  const std::lock_guard lock(capture_mutex());
  if (event->capture != nullptr) return join(*stream, *event);
  if (event->last == nullptr) return kSuccess;
  if (stream->capture != nullptr) return stream->capture->spoil(kCaptureIsolation);
  stream->enqueue([record = event->last] { record->wait(false); }, /*is_wait=*/true);
  return kSuccess;
}

}  // namespace ringcomm::emulator
