#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/devices.h"
#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/communicator.h"
#include "cuda/bindings/driver_device.h"

namespace ringcomm {

namespace cuda {
class Event;
}

/// Runs the collectives of a group's device tensors. Everything is ordered by streams; the host
/// does not wait.
class DeviceCarrier {
 public:
  virtual ~DeviceCarrier() = default;

  /// "cuda_ipc", "p2p over nccl"
  virtual const std::string& name() const = 0;

  /// Enqueues one collective. The buffers of `call` are on the device of `place`. Called with that
  /// device, its DeviceContext and the stream current, by one thread at a time, in the same order
  /// on all ranks.
  virtual Traffic enqueue(const Collective& call, const CallHeader& header,
                          const DevicePlace& place) = 0;

  /// Sends and receives that must not wait for each other: two ranks that both send before they
  /// receive, in the order of one stream, would deadlock.
  virtual void exchange(const std::vector<DeviceMessage>& messages, const DevicePlace& place) = 0;

  /// The event after the last of these two calls, on its stream, if the carrier has recorded one.
  virtual std::shared_ptr<const cuda::Event> last_end() const { return nullptr; }

  /// Sets the algorithm of a header from values that are equal on all ranks.
  virtual void plan(const Collective& call, CallHeader& header) const = 0;

  /// Throws std::invalid_argument where a collective on this stream, or such messages, cannot be
  /// enqueued at all: it ends nothing then.
  virtual void check_collective(const DevicePlace&) const {}
  virtual void check_messages(const std::vector<DeviceMessage>&) {}
  /// Whether messages with `peer` can be enqueued now. The answer is the same on both ranks and
  /// valid as long as the group. Throws Error.
  virtual bool has_room_for_messages(int) { return true; }
  /// Whether its data has headers, so that kernels detect different calls.
  virtual bool finds_mismatches() const { return false; }

  /// Devices::lend(). Throws NotImplementedError where the carrier has no such memory.
  virtual SharedDeviceMemory lend(std::size_t num_bytes);
  /// Whether there is such memory.
  virtual bool can_lend() const { return false; }
  /// The same, in memory of earlier tensors; later work on the stream of `place` runs after their
  /// last use. Data is null if the group has no more memory. Collective; only if can_lend().
  virtual SharedDeviceMemory borrow(std::size_t /*num_bytes*/, const DevicePlace&) { return {}; }

  /// The works of the messages enqueued since the last call of this function, if they can fail by
  /// themselves: Work::exception() reports it before a stream continues.
  virtual std::vector<c10::intrusive_ptr<c10d::Work>> take_works() { return {}; }
  /// Whether work on a device may end without being complete, because this rank or another one has
  /// failed. Work that ended while this was false is complete. The group's failure gives the reason
  /// soon after.
  virtual bool may_have_given_up() const noexcept { return false; }

  /// Permanently ends enqueued work, whether or not its peers arrived. From any thread.
  virtual void abort() noexcept = 0;
};

/// This rank's side of a group, for creating a carrier.
struct DeviceCarrierGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  const GroupOptions& options;
  std::shared_ptr<Communicator> communicator;  ///< of the hosts' memory
};

/// The carrier of a group's tensors on `device`: the first available one of the list in
/// device_carrier.cc. Collective over the group; takes the GIL, and blocks. Throws Error, and
/// ValueError if no carrier supports the device.
std::unique_ptr<DeviceCarrier> make_device_carrier(const DeviceCarrierGroup& group,
                                                   c10::Device device);

}  // namespace ringcomm
