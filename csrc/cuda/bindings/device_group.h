#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "bindings/devices.h"
#include "collectives/call.h"
#include "communicator/communicator.h"
#include "cuda/bindings/device_work.h"

namespace ringcomm {

/// Assigns the order, streams and transport of a group's calls on device tensors, and keeps the
/// tensors that they use alive.
class DeviceGroup final : public Devices, public std::enable_shared_from_this<DeviceGroup> {
 public:
  DeviceGroup(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<GroupOptions> options,
              std::weak_ptr<Communicator> communicator, int rank, int world_size);
  ~DeviceGroup() override;

  WorkPtr start(c10::Device device, const CallInfo& info, std::vector<TensorCall> calls,
                Tensors results) override;
  void run_at_once(c10::Device device, const Collective& call, Tensors tensors) override;
  WorkPtr exchange(CallInfo info, std::vector<DeviceMessage> messages, Tensors results) override;
  int connect(c10::Device device) override { return transport(device).ranks_per_device(); }
  Algorithm algorithm_of(Collective call, c10::Device device) override;
  bool map(c10::Device device, const void* data, std::size_t num_bytes) override;
  void abort() noexcept override;
  void drain() override;

  /// If the group has failed, ends enqueued work; check() then throws the cause.
  void abort_if_failed();
  void check();
  /// Ends the group.
  void end(const std::string& why);
  /// A call has ended on a device without having done all: throws why, which other threads and
  /// ranks may be about to tell, or else ends the group for `detail`.
  [[noreturn]] void throw_aborted(const char* title, const std::string& detail);
  /// Whether another rank has failed; between hosts, this reads the store.
  bool has_another_aborted();

 private:
  /// The transport of a device. The first call makes it and is collective over the group.
  cuda::DeviceTransport& transport(c10::Device device);
  /// The same, for a call. Throws the reason if an earlier one has failed.
  cuda::DeviceTransport& transport_of_call(c10::Device device);
  /// Whether the last that it has enqueued was the transport's.
  using Body = c10::function_ref<bool(cuda::DeviceTransport&, const cuda::StreamContext&)>;

  std::shared_ptr<DeviceOperation> enqueue(c10::Device device, bool is_async, int peer,
                                           Tensors kept, const Body& body);
  WorkPtr enqueue_work(c10::Device device, const CallInfo& info, const Tensors& inputs,
                       Tensors kept, Tensors results, const Body& body);
  void run(Collective call, cuda::DeviceTransport& transport, const cuda::StreamContext& stream,
           const std::function<void()>& finish = {});
  std::shared_ptr<Communicator> communicator() const;
  c10::Stream own_stream(c10::Device device, int peer);
  void keep(const std::shared_ptr<DeviceOperation>& operation);
  /// Throws the reason for which the group ends, if a watchdog of this or another rank reports one
  /// in time, while `may_come()`.
  void await_reason(c10::function_ref<bool()> may_come);
  void ending_on_failure(c10::function_ref<std::string()> what, c10::function_ref<void()> enqueue);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<GroupOptions> options_;
  std::weak_ptr<Communicator> communicator_;
  int rank_;
  int world_size_;

  std::atomic<int> num_checks_ = 0;  // of headers, under way
  std::mutex order_;                 // held while a call is enqueued; guards what follows
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_;
  std::vector<recorder::Call> recorded_;  // of the call that is being enqueued
  bool has_awaited_reason_ = false;       // after a call that gave up
  const char* told_why_staged_ = nullptr;

  std::mutex making_;  // held while a transport is made
  std::mutex mutex_;   // held for moments; guards what follows
  std::deque<std::shared_ptr<DeviceOperation>> operations_;  // perhaps not waited for yet
  std::vector<at::Tensor> lost_;  // of calls that failed half-way: they may still be in use
  std::map<c10::DeviceIndex, std::unique_ptr<cuda::DeviceTransport>> transports_;
  bool is_aborted_ = false;
};

}  // namespace ringcomm
