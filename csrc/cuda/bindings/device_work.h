#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "collectives/failure.h"
#include "collectives/recorder.h"
#include "cuda/collectives/device_transport.h"
#include "kernels/cuda_device.h"

namespace ringcomm {

class DeviceGroup;

/// Makes the context of a device of the driver current while it lives; does nothing for others.
struct DeviceContext : std::optional<cuda::ContextGuard> {
  explicit DeviceContext(c10::Device device) {
    if (has_driver_for(device)) emplace(device.index());
  }
};

/// A point in a device's stream: of cuda::EventPool, or of torch for devices without the driver.
class DeviceEvent {
 public:
  /// After the work that the stream holds now. With the DeviceContext of its device.
  static DeviceEvent record(const c10::Stream& stream) {
    if (has_driver_for(stream.device()))
      return DeviceEvent(cuda::EventPool::of(stream.device_index()).record(handle_of(stream)));
    c10::Event event(stream.device_type());
    event.record(stream);
    return DeviceEvent(std::move(event));
  }
  /// One that the engine of a device of the driver has recorded.
  explicit DeviceEvent(std::shared_ptr<const cuda::Event> event) : of_driver_(std::move(event)) {}

  /// Makes a stream wait. With the DeviceContext of its device.
  void block(const c10::Stream& stream) const {
    of_driver_ != nullptr ? of_driver_->block(handle_of(stream)) : of_torch_->block(stream);
  }
  /// Whether the stream has passed it, which is not captured; other streams may be.
  bool is_over() const {
    if (of_driver_ == nullptr) return of_torch_->query();
    const cuda::RelaxedCapture relaxed;
    return of_driver_->is_over();
  }

 private:
  explicit DeviceEvent(c10::Event event) : of_torch_(std::move(event)) {}

  std::shared_ptr<const cuda::Event> of_driver_;
  std::optional<c10::Event> of_torch_;  // where the other is null
};

/// The tensors that a call on a device uses, and the event of its end, which only counts if nothing
/// has failed by then: an aborted call ends with it, too. Thread-safe.
class DeviceOperation {
 public:
  using Outcomes = std::vector<cuda::DeviceTransport::Outcome>;
  using Recorded = std::vector<recorder::Call>;

  /// `end` is after the work enqueued on `stream`. Allocators reuse freed memory for later work on
  /// `home`, the current stream at the call. Captured work cannot be queried, and counts as
  /// complete at once. `transport` must live until mark_aborted(); `outcomes` are its.
  /// `recorded`: its calls in the flight recorder, which end when it is seen to be over.
  DeviceOperation(const c10::Stream& stream, const c10::Stream& home, bool is_captured,
                  DeviceEvent end, std::vector<at::Tensor> tensors,
                  const cuda::DeviceTransport& transport, Outcomes outcomes, Recorded recorded);

  const c10::Stream& stream() const { return stream_; }
  /// Whether the device is through; lets the tensors go then, and finds out whether it is broken.
  bool is_over();
  /// Checks whether it is broken; queries the device only if something has failed.
  void look_for_failure();
  /// Whether it was seen to be over.
  bool is_known_to_be_over();
  bool has_tensors();
  /// Makes the current stream wait; releases the tensors if that orders later users of their
  /// memory.
  void block_current_stream();
  /// The group has ended: work that is not known to be complete counts as broken.
  void mark_aborted();
  /// Another rank had failed by the time this ended.
  void mark_suspect();
  /// The error, which may be empty, if the device is known not to have done all of it.
  std::optional<std::string> failure();

 private:
  void record_failure(const std::exception_ptr& error);

  const c10::Stream stream_;
  const c10::Stream home_;
  const bool is_captured_;
  const DeviceEvent end_;
  std::mutex mutex_;                        // guards the rest
  const cuda::DeviceTransport* transport_;  // null from mark_aborted() on
  Outcomes outcomes_;                       // until it is over
  Recorded recorded_;
  bool is_over_;
  bool is_broken_ = false;
  std::string failure_;
  std::vector<at::Tensor> tensors_;
};

/// The device work of one c10d call, enqueued on a stream. The host never waits, except in barriers
/// and in wait() with a timeout.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(std::weak_ptr<DeviceGroup> group, int rank, c10d::OpType op_type, const char* title,
             const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results,
             std::uint64_t seq, std::optional<std::chrono::milliseconds> barrier_timeout);

  /// Called once, after everything was enqueued and before the work is shared.
  void set_enqueued(std::shared_ptr<DeviceOperation> operation);

  bool isCompleted() override;
  /// Whether it has not failed yet.
  bool isSuccess() const override;
  std::exception_ptr exception() const override {
    return error_of([&] { check_whole(); });
  }
  /// Makes the current stream wait; with a timeout, and for a barrier, the host as well. Throws
  /// CollectiveTimeoutError, or the error that ended the group.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override { return results_; }
  /// Complete immediately; its users wait on the device.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }

 private:
  void check_whole() const;
  void wait_on_host(std::chrono::milliseconds timeout, bool ends_group);

  std::weak_ptr<DeviceGroup> group_;
  const char* title_;
  std::vector<at::Tensor> results_;
  std::uint64_t seq_;
  /// The host waits for a barrier, so long; after that the group ends.
  std::optional<std::chrono::milliseconds> barrier_timeout_;
  std::shared_ptr<DeviceOperation> operation_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringcomm
