#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/tensors.h"
#include "collectives/call.h"
#include "host/wait.h"
#include "transport/transport.h"

namespace ringcomm {

/// A group's options in c10d's form, which split_group copies to the new group.
struct GroupOptions final : c10d::Backend::Options {
  CommunicatorOptions engine;

  GroupOptions(const CommunicatorOptions& engine_options, std::chrono::milliseconds timeout)
      : Options("ringcomm", timeout), engine(engine_options) {}
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// After a wait: torch keeps works, and their tensors, that a compiled function may await.
inline void unregister(c10d::Work& work) {
  if (c10d::allow_inflight_collective_as_graph_input())
    c10d::unregister_work(WorkPtr::reclaim_copy(&work));
}

/// Completes a future of `results` whose users wait for the current stream of each of its devices.
inline void mark_completed(c10::ivalue::Future& future, const Tensors& results) {
  if (future.devices().empty()) return future.markCompleted(c10::IValue(results));
  // torch records events on the devices of storages only, and batches and barriers have no result.
  Tensors stored = results;
  for (const c10::Device device : future.devices())
    stored.push_back(at::empty({0}, at::TensorOptions(at::kByte).device(device)));
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (const at::Tensor& tensor : stored)
    if (tensor.has_storage()) storages.push_back(tensor.storage().getWeakStorageImpl());
  future.markCompleted(c10::IValue(results), std::move(storages));
}

/// A send or receive of a tensor of `info.device`; `item` has one buffer of bytes, and its `finish`
/// is for afterwards.
struct DeviceMessage {
  CallInfo info;
  TensorCall item;
};

/// A group's calls on device tensors. The one implementation is in ringcomm._cuda (csrc/cuda).
/// Thread-safe; throws what the engine throws.
class Devices {
 public:
  virtual ~Devices() = default;

  /// Enqueues collectives. Synchronous ones run on the caller's current stream; asynchronous ones
  /// on the group's own stream, after the work of the current one. The host waits for a barrier,
  /// for `info.timeout` at most.
  virtual WorkPtr start(c10::Device device, const CallInfo& info, std::vector<TensorCall> calls,
                        Tensors results) = 0;
  /// Enqueues a synchronous collective on `tensors`, as start() does, without a work.
  virtual void run_at_once(c10::Device device, const Collective& call, Tensors tensors) = 0;
  /// Enqueues messages of one device of which none waits for another.
  virtual WorkPtr exchange(CallInfo info, std::vector<DeviceMessage> messages, Tensors results) = 0;
  /// Makes what carries the tensors of a device. Returns how many ranks share a device at most; 0
  /// where ranks do not access each other's memory. The first call is collective over the group.
  virtual int connect(c10::Device device) = 0;
  /// The algorithm that a call gets there.
  virtual Algorithm algorithm_of(Collective call, c10::Device device) = 0;

  /// Maps a buffer of each rank on all ranks; null where a rank has none. Collective over the
  /// group. Returns whether all are mapped. Throws NotImplementedError where ranks share no memory.
  virtual bool map(c10::Device device, const void* data, std::size_t num_bytes) = 0;

  virtual void abort() noexcept = 0;
  /// Waits until devices are through with all calls; where the group has failed, ends them.
  virtual void drain() = 0;
};

/// Messages by the send and recv of any backend of torch.distributed that moves CPU tensors: Gloo,
/// MPI, another package's. Messages with one tag must match in the order of their calls and may be
/// shorter than their receive, and Work::abort() (as Gloo's) or Backend::abort() (as most others')
/// must end waits: Gloo's time-outs end all messages of a group. The backend is for these alone.
std::unique_ptr<Messenger> messages_over(c10::intrusive_ptr<c10d::Backend> backend);

/// By how much a backend's own timeout is longer than the group's: ringcomm's names the late rank,
/// the backend's may end the process.
inline constexpr std::chrono::seconds kBackendGrace{60};

/// A new backend of torch.distributed for the messages of one group, created by
/// ringcomm.message_backend. `purpose` is for error messages. Collective over the group; takes the
/// GIL. Throws what `look` throws, and Error.
c10::intrusive_ptr<c10d::Backend> make_message_backend(const std::string& name,
                                                       const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::string& key, int rank, int size,
                                                       const GroupOptions& options,
                                                       const LookForRanks& look,
                                                       const std::string& purpose);
/// That of the group's tensors on a device. A rank that cannot arrive ends the group. Throws Error,
/// and ValueError on all ranks if no backend supports the device on one, or not the same one.
c10::intrusive_ptr<c10d::Backend> make_device_backend(c10::Device device,
                                                      const c10::intrusive_ptr<c10d::Store>& store,
                                                      Communicator& communicator,
                                                      const GroupOptions& options);

/// Makes a group's Devices.
using MakeDevices = std::shared_ptr<Devices> (*)(c10::intrusive_ptr<c10d::Store> store,
                                                 c10::intrusive_ptr<GroupOptions> options,
                                                 std::weak_ptr<Communicator> communicator, int rank,
                                                 int world_size);
/// Null until ringcomm._cuda is loaded.
extern MakeDevices make_devices;

}  // namespace ringcomm
