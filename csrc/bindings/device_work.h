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

#include "bindings/device_event.h"
#include "bindings/driver_device.h"

namespace ringcomm {

class DeviceCarrier;
class DeviceGroup;

/// What a call on a device uses until the device is through with it: the tensors, and the event
/// that says so. The event of a call that was aborted looks like that of one that is done, so it is
/// believed only where nothing has given up by then. Thread-safe.
class DeviceUse {
 public:
  using Parts = std::vector<c10::intrusive_ptr<c10d::Work>>;

  /// `end` is behind what was enqueued at `place`. Allocators give what is freed to those who come
  /// later on `home`, the stream that was current when the call was made.
  /// What is captured in a graph ends whenever that runs, and cannot be asked for: it counts as
  /// over at once. `carrier` must live until disown(); `parts` is what its take_works() gave.
  DeviceUse(const DevicePlace& place, const c10::Stream& home, DeviceEvent end,
            std::vector<at::Tensor> tensors, const DeviceCarrier& carrier, Parts parts);

  const c10::Stream& stream() const { return stream_; }
  /// Whether the device is through; lets the tensors go then, and finds out whether it is broken.
  bool is_over();
  /// Finds out whether it is broken; asks the device only where something has given up by now.
  void look_for_failure();
  /// Whether it was seen to be over.
  bool is_known_to_be_over();
  bool has_tensors();
  /// Has the current stream of the device wait, and lets the tensors go if that is enough for
  /// whoever gets their memory.
  void block_current_stream();
  /// The group has ended: what nobody has seen to be over counts as broken.
  void give_up();
  /// Another rank had given up by the time this was over.
  void doubt();
  /// As give_up(), and the carrier goes.
  void disown();
  /// Whether the device is through without having done all of it, as far as is_over() has seen.
  bool is_broken();
  /// What a part of it says of that; empty where none does.
  std::string failure();

 private:
  void note_failure(const std::exception_ptr& error);

  c10::Stream stream_;
  c10::Stream home_;
  std::mutex mutex_;  // guards the rest
  const DeviceCarrier* carrier_;
  Parts parts_;
  DeviceEvent end_;
  bool is_captured_;
  bool is_over_ = false;
  bool is_broken_ = false;
  std::string failure_;
  std::vector<at::Tensor> tensors_;
};

/// What one call of c10d has enqueued to a device: it is on its way, or will be as soon as its
/// stream gets there. Nothing here waits on the host, but for barriers and for wait() with a limit.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(std::weak_ptr<DeviceGroup> group, int rank, c10d::OpType op_type, const char* title,
             const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results,
             std::uint64_t seq);

  /// All has been enqueued. Called once, before anybody else has this work.
  void set_enqueued(std::shared_ptr<DeviceUse> use);
  /// The host waits for this one, so long; after that the group ends.
  void set_barrier(std::chrono::milliseconds timeout) { barrier_timeout_ = timeout; }

  bool isCompleted() override;
  /// Whether it has not failed so far.
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Has the current stream wait. With a limit, and for a barrier, the host waits too: throws
  /// CollectiveTimeoutError, and what ended the group.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return results_; }
  /// Complete at once; whoever uses it waits on the device.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }

 private:
  void check_whole() const;
  void wait_on_host(std::chrono::milliseconds timeout, bool ends_group);

  std::weak_ptr<DeviceGroup> group_;
  const char* title_;
  std::vector<at::Tensor> results_;
  std::uint64_t seq_;
  std::shared_ptr<DeviceUse> use_;
  std::optional<std::chrono::milliseconds> barrier_timeout_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringcomm
