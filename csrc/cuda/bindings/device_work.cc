#include "cuda/bindings/device_work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <thread>

#include "bindings/devices.h"
#include "bindings/python_errors.h"
#include "cuda/bindings/device_group.h"

namespace ringcomm {

// Between two looks at an event: short for what is about to end, and no burden for what is not.
constexpr std::chrono::microseconds kFirstNap{20};
constexpr std::chrono::microseconds kLongestNap{2000};

DeviceOperation::DeviceOperation(const c10::Stream& stream, const c10::Stream& home,
                                 bool is_captured, DeviceEvent end, std::vector<at::Tensor> tensors,
                                 const cuda::DeviceTransport& transport, Outcomes outcomes,
                                 Recorded recorded)
    : stream_(stream),
      home_(home),
      is_captured_(is_captured),
      end_(std::move(end)),
      transport_(&transport),
      outcomes_(std::move(outcomes)),
      recorded_(std::move(recorded)),
      is_over_(is_captured),
      tensors_(std::move(tensors)) {
  // On the caller's own stream, later users of the memory are ordered after this work.
  if (stream_ == home_) tensors_.clear();
  if (is_captured_) outcomes_.clear();
}

bool DeviceOperation::is_over() {
  std::vector<at::Tensor> freed;  // without the lock
  Outcomes ended;
  const std::lock_guard lock(mutex_);
  if (!is_over_ && end_.is_over()) {
    is_over_ = true;
    // Checked after the event has passed, because a failing transport sets this first.
    is_broken_ = is_broken_ || (transport_ != nullptr && transport_->may_be_aborted());
    ended.swap(outcomes_);
    for (const auto& outcome : ended) record_failure(outcome());
    std::ranges::for_each(recorded_, &recorder::Call::end);
  }
  if (is_over_ && !is_captured_) freed.swap(tensors_);
  return is_over_;
}

void DeviceOperation::look_for_failure() {
  {
    const std::lock_guard lock(mutex_);
    if (is_over_) return;
    if (outcomes_.empty() && (transport_ == nullptr || !transport_->may_be_aborted())) return;
  }
  is_over();
}

bool DeviceOperation::is_known_to_be_over() {
  const std::lock_guard lock(mutex_);
  return is_over_;
}

bool DeviceOperation::has_tensors() {
  const std::lock_guard lock(mutex_);
  return !tensors_.empty();
}

void DeviceOperation::block_current_stream() {
  const c10::Stream current =
      c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
  if (current != stream_) {
    const DeviceContext context(current.device());
    end_.block(current);
  }
  if (current != home_) return;
  std::vector<at::Tensor> freed;  // without the lock
  const std::lock_guard lock(mutex_);
  freed.swap(tensors_);
}

// With the lock held.
void DeviceOperation::record_failure(const std::exception_ptr& error) {
  if (error == nullptr || !failure_.empty()) return;
  is_broken_ = true;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& what) {
    failure_ = what.what();
  } catch (...) {
    failure_ = "an exception that is not a std::exception";
  }
}

void DeviceOperation::mark_aborted() {
  const std::lock_guard lock(mutex_);
  is_broken_ = is_broken_ || !is_over_;
  transport_ = nullptr;
}

void DeviceOperation::mark_suspect() {
  const std::lock_guard lock(mutex_);
  is_broken_ = !is_captured_;
}

std::optional<std::string> DeviceOperation::failure() {
  const std::lock_guard lock(mutex_);
  return is_broken_ ? std::optional(failure_) : std::nullopt;
}

DeviceWork::DeviceWork(std::weak_ptr<DeviceGroup> group, int rank, c10d::OpType op_type,
                       const char* title, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> results, std::uint64_t seq,
                       std::optional<std::chrono::milliseconds> barrier_timeout)
    : Work(rank, op_type, title, inputs),
      group_(std::move(group)),
      title_(title),
      results_(std::move(results)),
      seq_(seq),
      barrier_timeout_(barrier_timeout) {}

void DeviceWork::set_enqueued(std::shared_ptr<DeviceOperation> operation) {
  operation_ = std::move(operation);
  finish();  // of its record: for profilers a call ends where the host is done with it
}

// A stream of a group that has failed may stay blocked.
bool DeviceWork::isCompleted() { return operation_->is_over() || !isSuccess(); }

bool DeviceWork::isSuccess() const {
  operation_->look_for_failure();
  if (const auto group = group_.lock(); group != nullptr) group->abort_if_failed();
  return !operation_->failure().has_value();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  with_python_errors([&] {
    check_whole();
    operation_->block_current_stream();
    if (timeout != kNoTimeout)
      wait_on_host(timeout, false);
    else if (barrier_timeout_)
      wait_on_host(*barrier_timeout_, true);
  });
  unregister(*this);
  return true;
}

void DeviceWork::check_whole() const {
  if (isSuccess()) return;
  if (const auto group = group_.lock(); group != nullptr)
    group->throw_aborted(title_, operation_->failure().value_or(""));
  throw Error({.kind = ErrorKind::kAborted, .op = title_},
              std::string("ringcomm: ") + title_ + " was not complete when its group ended");
}

void DeviceWork::wait_on_host(std::chrono::milliseconds timeout, bool ends_group) {
  const auto deadline = deadline_after(timeout);
  for (auto nap = kFirstNap; !operation_->is_over(); nap = std::min(2 * nap, kLongestNap)) {
    const bool is_late = RunningClock::now() >= deadline;
    if (const auto group = group_.lock(); group != nullptr) {
      if (is_interrupted()) group->end("interrupted by a signal");
      if (is_late && ends_group)
        group->end(std::string(title_) + " waited for all ranks for " +
                   std::to_string(timeout.count()) + " ms");
    }
    check_whole();
    if (is_late) throw_wait_timeout(title_, timeout);
    std::this_thread::sleep_for(nap);
  }
  if (const auto group = group_.lock(); group != nullptr && group->has_another_aborted())
    operation_->mark_suspect();
  check_whole();
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard lock(future_mutex_);
  if (future_ != nullptr) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()),
      std::vector<c10::Device>{operation_->stream().device()});
  // The future takes its events from the stream that is current.
  const c10::StreamGuard guard(operation_->stream());
  mark_completed(*future_, results_);
  return future_;
}

}  // namespace ringcomm
