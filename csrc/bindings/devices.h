#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bindings/tensors.h"
#include "collectives/collective.h"

namespace ringcomm {

/// A group's options in c10d's form, which split_group copies to the new group.
struct GroupOptions final : c10d::Backend::Options {
  CommunicatorOptions engine;

  GroupOptions(const CommunicatorOptions& engine_options, std::chrono::milliseconds timeout)
      : Options("ringcomm", timeout), engine(engine_options) {}
};

/// The metadata of a call.
struct DeviceCallInfo {
  c10d::OpType op_type;
  const char* title;
  std::vector<at::Tensor> results;
  bool is_async = true;
  std::optional<std::chrono::milliseconds> barrier_timeout = {};  ///< of what the host waits for
  int peer = -1;                                                  ///< of a message alone
};

/// A user's send or receive.
struct DeviceMessage {
  bool is_send;
  void* data;
  std::size_t num_bytes;
  int peer;
  int tag;
};

/// The same, and what it needs: `finish` of `item` is for afterwards.
struct DeviceMessageCall {
  c10::Device device;
  DeviceMessage message;
  TensorCall item;
};

/// Memory on a rank's device that the other ranks read and write where it is; none if data is null.
struct SharedDeviceMemory {
  void* data = nullptr;
  /// Called once, from any thread, when the tensor is destroyed: only the work that these streams
  /// hold now may still use the memory.
  std::function<void(const std::vector<c10::Stream>&)> give_back;
};

/// A group's calls on device tensors. The one implementation is in ringcomm._cuda (csrc/cuda).
/// Thread-safe; throws what the engine throws.
class Devices {
 public:
  virtual ~Devices() = default;

  /// Enqueues collectives. Synchronous ones run on the caller's current stream; asynchronous ones
  /// on the group's own stream, after the work of the current one.
  virtual c10::intrusive_ptr<c10d::Work> start(c10::Device device, std::vector<TensorCall> calls,
                                               DeviceCallInfo info) = 0;
  /// Enqueues messages of which none waits for another.
  virtual c10::intrusive_ptr<c10d::Work> exchange(c10::Device device,
                                                  std::vector<DeviceMessageCall> calls,
                                                  DeviceCallInfo info) = 0;
  /// Makes what carries the tensors of a device. The first call is collective over the group.
  virtual void connect(c10::Device device) = 0;
  /// The algorithm that a call gets there.
  virtual Algorithm algorithm_of(const Collective& call, c10::Device device) = 0;
  /// A readable description of the transport of each device.
  virtual std::map<std::string, std::string> transports() = 0;

  /// Memory that other ranks access directly. Collective over the group. Throws
  /// NotImplementedError where there is none.
  virtual SharedDeviceMemory lend(c10::Device device, std::size_t num_bytes) = 0;
  /// Whether that device, which is connected already, has such memory.
  virtual bool can_lend(c10::DeviceIndex device) = 0;
  /// The same, in memory of earlier tensors; later work on the stream runs after their last use.
  /// Empty if the group has no more memory. Collective; only if can_lend().
  virtual SharedDeviceMemory borrow(const c10::Stream& stream, std::size_t num_bytes) = 0;

  virtual void abort() noexcept = 0;
  /// Waits until devices are through with all calls; where the group has failed, ends them.
  virtual void drain() = 0;
};

/// Makes a group's Devices.
using MakeDevices = std::shared_ptr<Devices> (*)(c10::intrusive_ptr<c10d::Store> store,
                                                 c10::intrusive_ptr<GroupOptions> options,
                                                 std::weak_ptr<Communicator> communicator, int rank,
                                                 int world_size);
/// Null until ringcomm._cuda is loaded.
extern MakeDevices make_devices;

}  // namespace ringcomm
