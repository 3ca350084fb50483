#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collectives/failure.h"
#include "collectives/recorder.h"
#include "cuda/bindings/driver_device.h"
#include "cuda/collectives/device_transport.h"

namespace ringcomm {

class DeviceGroup;

/// The tensors that a call on a device uses, and the event of its end, which only counts if nothing
/// has failed by then: an aborted call ends with it, too. Thread-safe.
class DeviceUse {
 public:
  using Outcomes = std::vector<cuda::DeviceTransport::Outcome>;
  using Recorded = std::vector<recorder::Call>;

  /// `end` is after the work enqueued on `stream`. Allocators reuse freed memory for later work on
  /// `home`, the current stream at the call. Captured work cannot be queried, and counts as
  /// complete at once. `transport` must live until give_up(); `outcomes` are its.
  /// `recorded`: its calls in the flight recorder, which end when it is seen to be over.
  DeviceUse(const c10::Stream& stream, const c10::Stream& home, bool is_captured, DeviceEvent end,
            std::vector<at::Tensor> tensors, const cuda::DeviceTransport& transport,
            Outcomes outcomes, Recorded recorded);

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
  void give_up();
  /// Another rank had failed by the time this ended.
  void doubt();
  /// The error, which may be empty, if the device is known not to have done all of it.
  std::optional<std::string> failure();

 private:
  void record_failure(const std::exception_ptr& error);

  const c10::Stream stream_;
  const c10::Stream home_;
  const bool is_captured_;
  const DeviceEvent end_;
  std::mutex mutex_;                        // guards the rest
  const cuda::DeviceTransport* transport_;  // null from give_up() on
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
  void set_enqueued(std::shared_ptr<DeviceUse> use);

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
  std::shared_ptr<DeviceUse> use_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringcomm
