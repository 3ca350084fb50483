#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "cuda/collectives/device_group.h"
#include "cuda/collectives/device_watch.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/kernels.h"
#include "cuda/collectives/lent_memory.h"

namespace ringcomm::cuda {

/// A collective as it is launched.
struct PlannedCall {
  HeaderWords header = {};
  LaunchPlan plan;
  Function kernel = nullptr;
  KernelCall call;
};

/// Collectives on GPU tensors. Each call launches kernels on the caller's stream and returns
/// without waiting for them, except if ranks take turns on a device: there no kernel may wait for
/// another rank's, so a call is launched step by step, and all hosts wait for each step.
///
/// Calls of a group run in the order in which they are made, also on different streams. A watchdog
/// thread (DeviceWatch) detects failures on the device and ends the group.
class Engine {
 public:
  /// Collective over the group. Throws Unavailable, Error. `limits` apply to each wait of this host
  /// for another. `report` is called from another thread with the error that ended the group.
  static std::unique_ptr<Engine> make(Communicator& communicator, DeviceOrdinal device,
                                      const WaitLimits& limits,
                                      std::function<void(const std::string&)> report);
  /// Waits for what was launched.
  ~Engine();

  const std::string& description() const { return group_->description(); }
  /// Bytes of this rank's staging on the device.
  std::size_t staging_bytes() const { return group_->staging().layout.num_bytes(); }

  void plan(const Collective& call, CallHeader& header) const;
  /// Throw std::invalid_argument where what follows cannot be.
  void check_collective(const StreamPlace& place) const;
  void check_messages(const std::vector<P2pMessage>& messages) const;
  /// Whether the GPU has room for kernels that wait for messages of `peer`, decided by both ranks
  /// together. Throws Error if that rank ends during the decision.
  bool has_room_for_messages(int peer);
  /// One thread at a time, with the device's context current. Throws Error.
  Traffic enqueue(const Collective& call, const CallHeader& header, const StreamPlace& place);
  /// Messages of which none waits for another, and which check_messages() takes, with ranks that
  /// there is room for. By one thread at a time, with the device's context current.
  void exchange(const std::vector<P2pMessage>& messages, const StreamPlace& place);
  /// The event after the last of these two calls, on its stream; not null after the first call.
  const std::shared_ptr<const Event>& last_end() const { return last_end_; }
  /// Memory on this rank's device in which peers read and write buffers of collectives where they
  /// are. Collective. Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const Loan> lend(std::size_t num_bytes);
  bool can_lend() const { return !group_->takes_turns(); }
  /// The same, in memory that is used again and waits for its last use; see LentMemory. Null where
  /// the group has no more. Collective; only where can_lend(). With the device's context current.
  std::shared_ptr<const Loan> borrow(std::size_t num_bytes, const StreamPlace& place);

  /// Permanently ends the waits of all kernels. From any thread.
  void abort() noexcept { watch_.end_waits(); }
  /// Whether they do, or one has by itself, or one of another rank. From any thread.
  bool may_have_given_up() const noexcept {
    return __atomic_load_n(&group_->control().abort, __ATOMIC_ACQUIRE) != 0 ||
           communicator_.members()->is_given_up(/*asks=*/false);
  }

 private:
  Engine(Communicator& communicator, DeviceOrdinal device, const WaitLimits& limits,
         std::function<void(const std::string&)> report);

  /// The part of the parameters that all kernels share.
  GroupFrame frame() const;
  /// Valid until the next call of this function. Throws as plan_launch().
  PlannedCall& plan_call(const Collective& call, const CallHeader& header);
  void launch_in_turns(PlannedCall& planned, StreamHandle stream);
  std::uint64_t meet(std::uint64_t value);
  unsigned blocks_of_messages(int peer);
  void look_at_peer(int peer, std::chrono::steady_clock::time_point deadline);
  void check_alive();

  Communicator& communicator_;
  WaitLimits limits_;
  RecordExchange exchange_;
  std::unique_ptr<DeviceGroup> group_;
  const Kernels& kernels_;
  EventPool& events_;
  /// The last calls whose plans are used again, by a hash of their headers, and another one.
  std::array<PlannedCall, 16> plans_;
  PlannedCall other_plan_;
  CallBoard calls_;
  LentMemory lent_;
  DeviceWatch watch_;
  std::uint64_t num_launches_ = 0;
  std::shared_ptr<const Event> last_end_;
  StreamOrder collectives_;
  std::map<int, StreamOrder> messages_;  // with each peer
};

}  // namespace ringcomm::cuda
