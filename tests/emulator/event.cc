#include <memory>
#include <vector>

#include "emulator/capture.h"
#include "emulator/completion.h"

struct ringcomm::cuda::EventTag {
  EventTag(Context of, unsigned with_flags, std::shared_ptr<emulator::Completion> records)
      : context(of), flags(with_flags), completion(std::move(records)) {}

  const Context context;
  const unsigned flags;
  const std::shared_ptr<emulator::Completion> completion;

  // The capture in which it was recorded last, and what it comes after there; guarded by
  // capture_mutex().
  std::shared_ptr<emulator::Capture> capture;
  std::vector<int> after;
};

namespace ringcomm::emulator {
namespace {

constexpr unsigned kBlockingSync = 1;
constexpr unsigned kEventFlags = kBlockingSync | kEventDisableTiming | kEventInterprocess;

Result find_event(EventHandle handle, std::shared_ptr<EventTag>* event) {
  RINGCOMM_TRY(require_initialized());
  *event = Handles<EventTag>::all().find(handle);
  return *event != nullptr ? kSuccess : kInvalidHandle;
}

Result check_not_captured(EventTag& event) {
  const std::lock_guard lock(capture_mutex());
  if (event.capture == nullptr) return kSuccess;
  event.capture->is_invalidated = true;
  return kCapturedEvent;
}

Result record_in_capture(EventTag& event, StreamTag& stream) {
  if (stream.capture->is_invalidated) return kCaptureWasInvalidated;
  if ((event.flags & kEventInterprocess) != 0) {
    stream.capture->is_invalidated = true;
    return kCaptureUnsupported;
  }
  event.capture = stream.capture;
  event.after = stream.tails;
  return kSuccess;
}

/// Makes the stream part of the capture that the event was recorded in.
Result join(StreamTag& stream, const EventTag& event) {
  if (event.capture->has_ended) return kCapturedEvent;
  if (event.capture->is_invalidated) return kCaptureWasInvalidated;
  if (stream.capture != nullptr && stream.capture != event.capture) {
    stream.capture->is_invalidated = event.capture->is_invalidated = true;
    return kCaptureMerge;
  }
  if (stream.capture == nullptr) {
    if (stream.context->null_stream == &stream) {
      event.capture->is_invalidated = true;
      return kCaptureImplicit;
    }
    stream.capture = event.capture;
    stream.capture->streams.push_back(stream.weak_from_this());
  }
  stream.tails.insert(stream.tails.end(), event.after.begin(), event.after.end());
  return kSuccess;
}

}  // namespace

Result api::event_create(EventHandle* event, unsigned flags) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  const bool is_shared = (flags & kEventInterprocess) != 0;
  if (event == nullptr || (flags & ~kEventFlags) != 0 ||
      (is_shared && (flags & kEventDisableTiming) == 0))
    return kInvalidValue;
  std::shared_ptr<Completion> completion =
      is_shared ? make_shared_completion() : std::make_shared<LocalCompletion>();
  if (completion == nullptr) return kErrorOutOfMemory;
  *event = Handles<EventTag>::all().add(
      std::make_shared<EventTag>(context, flags, std::move(completion)));
  return kSuccess;
}

Result api::event_destroy(EventHandle event) {
  RINGCOMM_TRY(require_initialized());
  const std::shared_ptr<EventTag> removed = Handles<EventTag>::all().remove(event);
  if (removed == nullptr) return kInvalidHandle;
  check_not_opened_elsewhere(*removed->completion);
  return kSuccess;
}

Result api::event_record(EventHandle handle, StreamHandle stream_handle) {
  std::shared_ptr<EventTag> event;
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(stream_handle, &stream));
  RINGCOMM_TRY(find_event(handle, &event));
  if (event->context != stream->context) return kInvalidHandle;
  const std::lock_guard lock(capture_mutex());
  if (stream->capture != nullptr) return record_in_capture(*event, *stream);
  event->capture = nullptr;
  const std::uint64_t record = event->completion->begin();
  stream->enqueue([completion = event->completion, record] { completion->finish(record); });
  return kSuccess;
}

Result api::event_query(EventHandle handle) {
  std::shared_ptr<EventTag> event;
  RINGCOMM_TRY(find_event(handle, &event));
  RINGCOMM_TRY(check_not_captured(*event));
  RINGCOMM_TRY(check_unsafe_call());
  const std::uint64_t record = event->completion->last();
  return record == 0 || event->completion->is_finished(record) ? kSuccess : kErrorNotReady;
}

Result api::event_synchronize(EventHandle handle) {
  std::shared_ptr<EventTag> event;
  RINGCOMM_TRY(find_event(handle, &event));
  RINGCOMM_TRY(check_not_captured(*event));
  RINGCOMM_TRY(check_unsafe_call());
  const std::uint64_t record = event->completion->last();
  if (record != 0) event->completion->wait(record);
  return kSuccess;
}

Result api::stream_wait_event(StreamHandle stream_handle, EventHandle handle, unsigned flags) {
  std::shared_ptr<EventTag> event;
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(stream_handle, &stream));
  RINGCOMM_TRY(find_event(handle, &event));
  if (flags != 0) return kInvalidValue;
  const std::lock_guard lock(capture_mutex());
  if (event->capture != nullptr) return join(*stream, *event);
  const std::uint64_t record = event->completion->last();
  if (record == 0) return kSuccess;
  if (stream->capture != nullptr) {
    stream->capture->is_invalidated = true;
    return kCaptureIsolation;
  }
  stream->enqueue([completion = event->completion, record] { completion->wait(record); },
                  /*is_wait=*/true);
  return kSuccess;
}

Result api::ipc_get_event_handle(IpcEventHandle* handle, EventHandle event_handle) {
  std::shared_ptr<EventTag> event;
  RINGCOMM_TRY(find_event(event_handle, &event));
  if (handle == nullptr) return kInvalidValue;
  return export_completion(*event->completion, handle);
}

Result api::ipc_open_event_handle(EventHandle* event, IpcEventHandle handle) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (event == nullptr) return kInvalidValue;
  std::shared_ptr<Completion> completion;
  RINGCOMM_TRY(import_completion(handle, &completion));
  *event = Handles<EventTag>::all().add(std::make_shared<EventTag>(
      context, kEventDisableTiming | kEventInterprocess, std::move(completion)));
  return kSuccess;
}

}  // namespace ringcomm::emulator
