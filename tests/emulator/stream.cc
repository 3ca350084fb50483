#include "emulator/stream.h"

#include <chrono>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "emulator/capture.h"
#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr std::uintptr_t kLegacyStream = 1;  // CU_STREAM_LEGACY: the null stream by name

void sleep_at_random(std::minstd_rand& random) {
  const int longest = settings().max_delay_us;
  if (longest == 0) return;
  std::uniform_int_distribution<int> delay(0, longest);
  std::this_thread::sleep_for(std::chrono::microseconds(delay(random)));
}

/// For the next stream of a device; null where each has one of its own.
HardwareQueue* next_queue(DeviceOrdinal device) {
  if (settings().num_queues == 0) return nullptr;
  static auto& mutex = *new std::mutex();
  static auto& all =
      *new std::map<DeviceOrdinal, std::pair<std::vector<HardwareQueue>, std::size_t>>();
  const std::lock_guard lock(mutex);
  auto& [queues, num_streams] = all[device];
  if (queues.empty())
    queues = std::vector<HardwareQueue>(static_cast<std::size_t>(settings().num_queues));
  return &queues[num_streams++ % queues.size()];
}

/// Every context has one, made when first used.
std::shared_ptr<StreamTag> null_stream(Context context) {
  const std::lock_guard lock(context->mutex);
  if (context->null_stream == nullptr)
    context->null_stream = Handles<StreamTag>::all().add(std::make_shared<StreamTag>(context, 0u));
  return Handles<StreamTag>::all().find(context->null_stream);
}

}  // namespace

}  // namespace ringcomm::emulator

namespace ringcomm::cuda {

StreamTag::StreamTag(Context of, unsigned with_flags)
    : context(of), flags(with_flags), hardware_(emulator::next_queue(of->device)) {}

void StreamTag::enqueue(std::function<void()> work, bool is_wait) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t ticket = hardware_ != nullptr ? hardware_->take_ticket() : 0;
  queue_.push_back({std::move(work), is_wait, ticket});
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
  std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 4));
  std::unique_lock lock(mutex_);
  for (;;) {
    has_news_.wait(lock, [this] { return !queue_.empty() || is_closed_; });
    if (queue_.empty()) return;
    {
      const Item item = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      emulator::sleep_at_random(random);
      if (hardware_ != nullptr) hardware_->wait_for_turn(item.ticket);
      if (hardware_ != nullptr && !item.is_wait) hardware_->pass_on();
      item.work();
      if (hardware_ != nullptr && item.is_wait) hardware_->pass_on();
    }
    lock.lock();
    ++num_done_;
    has_news_.notify_all();
  }
}

}  // namespace ringcomm::cuda

namespace ringcomm::emulator {

Result find_stream(StreamHandle handle, std::shared_ptr<StreamTag>* stream, bool only_asks) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (reinterpret_cast<std::uintptr_t>(handle) <= kLegacyStream) {
    RINGCOMM_TRY(check_null_stream(context, only_asks));
    *stream = null_stream(context);
    return kSuccess;
  }
  *stream = Handles<StreamTag>::all().find(handle);
  return *stream != nullptr ? kSuccess : kInvalidHandle;
}

void synchronize_context(Context context) {
  for (const std::shared_ptr<StreamTag>& stream : Handles<StreamTag>::all().list())
    if (stream->context == context) stream->synchronize();
}

Result api::ctx_synchronize() {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  RINGCOMM_TRY(check_unsafe_call());
  synchronize_context(context);
  return kSuccess;
}

Result api::stream_create(StreamHandle* stream, unsigned flags) {
  Context context = nullptr;
  RINGCOMM_TRY(require_context(&context));
  if (stream == nullptr || flags > kStreamNonBlocking) return kInvalidValue;
  *stream = Handles<StreamTag>::all().add(std::make_shared<StreamTag>(context, flags));
  return kSuccess;
}

Result api::stream_destroy(StreamHandle stream) {
  RINGCOMM_TRY(require_initialized());
  const std::shared_ptr<StreamTag> removed = Handles<StreamTag>::all().remove(stream);
  if (removed == nullptr) return kInvalidHandle;
  invalidate_capture(*removed);
  removed->close();
  return kSuccess;
}

Result api::stream_synchronize(StreamHandle handle) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  RINGCOMM_TRY(check_not_capturing(*stream));
  RINGCOMM_TRY(check_unsafe_call());
  stream->synchronize();
  return kSuccess;
}

Result api::stream_query(StreamHandle handle) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  RINGCOMM_TRY(check_not_capturing(*stream));
  RINGCOMM_TRY(check_unsafe_call());
  return stream->is_idle() ? kSuccess : kErrorNotReady;
}

}  // namespace ringcomm::emulator
