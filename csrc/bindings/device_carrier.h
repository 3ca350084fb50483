#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "bindings/driver_device.h"
#include "bindings/group_options.h"
#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/communicator.h"

namespace ringcomm {

namespace cuda {
class Event;
}

/// A user's send or receive.
struct DeviceMessage {
  bool is_send;
  void* data;
  std::size_t num_bytes;
  int peer;
  int tag;
};

/// What carries the collectives of a group's device tensors. All of it happens in the order of
/// streams; the host waits for nothing.
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

  /// Sends and receives of which none may wait for another: two ranks that both send before they
  /// receive, in the order of one stream, would wait for ever.
  virtual void exchange(const std::vector<DeviceMessage>& messages, const DevicePlace& place) = 0;

  /// The event behind the last of these two, on its stream, where the carrier has recorded one.
  virtual std::shared_ptr<const cuda::Event> last_end() const { return nullptr; }

  /// Fills in algorithm and geometry of a header, from what is equal on all ranks.
  virtual void plan(const Collective& call, CallHeader& header) const = 0;

  /// Throws std::invalid_argument where a collective on this stream, or such messages, cannot be
  /// enqueued at all: it ends nothing then.
  virtual void check_collective(const DevicePlace&) const {}
  virtual void check_messages(const std::vector<DeviceMessage>&) {}
  /// Whether messages with `peer` can be enqueued now. The answer is the same on both ranks, and
  /// stands as long as the group. Throws Error.
  virtual bool has_room_for_messages(int) { return true; }
  /// Whether its data tells what call it is of, so that calls that differ are found where they
  /// meet.
  virtual bool finds_mismatches() const { return false; }

  /// How many clusters of so many blocks a kernel of rows that ranks wait in (cuda::RowLaunch) may
  /// have, where the device runs `max_active` of them at a time; 0: there is no such kernel in this
  /// group. The same on all ranks; collective when a number of blocks is first asked for.
  virtual int row_clusters(unsigned /*cluster_blocks*/, int /*max_active*/) { return 0; }

  /// Memory on this rank's device that the other ranks read and write where it is. Collective.
  /// Throws NotImplementedError where the carrier has no such memory.
  struct LentMemory {
    void* data;
    /// Its tensor is gone, and only what these streams hold now may still use the memory. Called
    /// once, from any thread.
    std::function<void(const std::vector<c10::Stream>&)> give_back;
  };
  virtual LentMemory lend(std::size_t num_bytes);

  /// What carries what was enqueued since the last call of this, where that may fail by itself:
  /// Work::exception() says so before a stream goes on.
  virtual std::vector<c10::intrusive_ptr<c10d::Work>> take_works() { return {}; }
  /// Whether what ends on a device may end undone, as this rank or another one gives up. What was
  /// over before this was false is done. The group's failure says why, soon after.
  virtual bool may_have_given_up() const noexcept { return false; }

  /// Whether streams wait for a rank that has died, and may do so as long as this process lives.
  virtual bool is_stuck() const { return false; }

  /// For ever: what is enqueued ends soon, whether its peers came or not. From any thread.
  virtual void abort() noexcept = 0;
};

/// What a carrier is made of: a group, as this rank has it.
struct DeviceCarrierGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  const GroupOptions& options;
  std::shared_ptr<Communicator> communicator;  ///< of the hosts' memory
};

/// The carrier of a group's tensors on `device`: the first that can be had, in the order of the
/// list in device_carrier.cc. Collective over the group; takes the GIL, and blocks. Throws Error,
/// and ValueError where nothing carries such tensors.
std::unique_ptr<DeviceCarrier> make_device_carrier(const DeviceCarrierGroup& group,
                                                   c10::Device device);

}  // namespace ringcomm
