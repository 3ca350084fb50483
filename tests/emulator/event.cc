// Events, of one process or shared.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "emulator/capture.h"
#include "emulator/physical_memory.h"

namespace ringcomm::emulator {

/// The records of an event, and how many of them the streams have reached. Records are numbered
/// from 1. In memory that processes can share, and without locks, because a killed process could
/// hold one.
class Completion {
 public:
  /// For an event that this process creates, shared or not. Null if the system refuses its memory.
  static std::shared_ptr<Completion> create(bool is_shared) {
    shm::UniqueFd fd;
    if (is_shared) {
      fd.reset(memfd_create("ringcomm-emulated-event", MFD_CLOEXEC));
      if (!fd || ftruncate(fd.get(), sizeof(Records)) != 0) return nullptr;
    }
    std::shared_ptr<Completion> made(new Completion(std::move(fd), true));
    return made->records_ != nullptr ? made : nullptr;
  }
  /// For an event that another process has created.
  static Result import(const IpcEventHandle& handle, std::shared_ptr<Completion>* completion) {
    shm::UniqueFd fd;
    RINGCOMM_TRY(open_handle(IpcKind::kEvent, &handle, &fd));
    completion->reset(new Completion(std::move(fd), false));
    return (*completion)->records_ != nullptr ? kSuccess : kMapFailed;
  }

  ~Completion() {
    if (records_ != nullptr) munmap(records_, sizeof(Records));
  }
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  std::uint64_t last() { return records_->last; }  ///< 0: none was made
  std::uint64_t begin() { return ++records_->last; }
  bool is_finished(std::uint64_t record) { return records_->slot(record) >= record; }
  void finish(std::uint64_t record) {
    std::atomic<std::uint64_t>& slot = records_->slot(record);
    std::uint64_t before = slot;
    while (before < record && !slot.compare_exchange_weak(before, record)) {
    }
    ++records_->num_finished;
    syscall(SYS_futex, &records_->num_finished, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
  void wait(std::uint64_t record) {
    for (;;) {
      const std::uint32_t seen = records_->num_finished;
      if (is_finished(record)) return;
      const timespec slice = {.tv_sec = 1, .tv_nsec = 0};
      syscall(SYS_futex, &records_->num_finished, FUTEX_WAIT, seen, &slice, nullptr, 0);
    }
  }

  Result export_to(IpcEventHandle* handle) const {
    return fd_ ? write_handle(IpcKind::kEvent, fd_.get(), handle) : kInvalidHandle;
  }
  /// Ends this process if another has the event open, which this one has made.
  void check_not_opened_elsewhere() const {
    if (fd_ && is_own_) emulator::check_not_opened_elsewhere(fd_.get(), "an event");
  }

 private:
  /// The slot of a record holds it, or a later one of the same slot, once it is finished.
  struct Records {
    static constexpr std::uint64_t kNumSlots = 1024;  // more are never outstanding
    std::atomic<std::uint64_t> last;
    std::atomic<std::uint32_t> num_finished;  // what waits sleeps on this
    std::atomic<std::uint64_t> slots[kNumSlots];

    std::atomic<std::uint64_t>& slot(std::uint64_t record) { return slots[record % kNumSlots]; }
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  Completion(shm::UniqueFd fd, bool is_own) : fd_(std::move(fd)), is_own_(is_own) {
    const int flags = fd_ ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* mapped = mmap(nullptr, sizeof(Records), PROT_READ | PROT_WRITE, flags, fd_.get(), 0);
    if (mapped != MAP_FAILED) records_ = static_cast<Records*>(mapped);
  }

  shm::UniqueFd fd_;  // none: only this process has it
  bool is_own_;       // or another process's
  Records* records_ = nullptr;
};

}  // namespace ringcomm::emulator

struct ringcomm::cuda::EventTag {
  EventTag(Context of, unsigned with_flags, std::shared_ptr<emulator::Completion> records)
      : context(of), flags(with_flags), completion(std::move(records)) {}

  const Context context;
  const unsigned flags;
  const std::shared_ptr<emulator::Completion> completion;

  // The capture in which it was recorded last, and its dependencies there; guarded by
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
  std::shared_ptr<Completion> completion = Completion::create(is_shared);
  if (completion == nullptr) return kErrorOutOfMemory;
  *event = Handles<EventTag>::all().add(
      std::make_shared<EventTag>(context, flags, std::move(completion)));
  return kSuccess;
}

Result api::event_destroy(EventHandle event) {
  RINGCOMM_TRY(require_initialized());
  const std::shared_ptr<EventTag> removed = Handles<EventTag>::all().remove(event);
  if (removed == nullptr) return kInvalidHandle;
  removed->completion->check_not_opened_elsewhere();
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
  return event->completion->export_to(handle);
}

Result api::ipc_open_event_handle(EventHandle* event, IpcEventHandle handle) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (event == nullptr) return kInvalidValue;
  std::shared_ptr<Completion> completion;
  RINGCOMM_TRY(Completion::import(handle, &completion));
  *event = Handles<EventTag>::all().add(std::make_shared<EventTag>(
      context, kEventDisableTiming | kEventInterprocess, std::move(completion)));
  return kSuccess;
}

}  // namespace ringcomm::emulator
