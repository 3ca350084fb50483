#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "cuda/collectives/call_board.h"
#include "cuda/collectives/device_group.h"
#include "cuda/collectives/device_watch.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/kernels.h"
#include "cuda/collectives/lent_memory.h"
#include "cuda/collectives/plan_cache.h"

namespace ringcomm::cuda {

/// Collectives on GPU tensors. Each call launches kernels on the caller's stream and returns
/// without waiting for them, except if ranks take turns on a device.
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
  /// Waits for what was launched, unless is_stuck().
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::string& description() const { return group_->description(); }
  /// Bytes of this rank's staging on the device.
  std::size_t staging_bytes() const { return group_->staging().layout.num_bytes(); }

  void plan(const Collective& call, CallHeader& header) const;
  /// Throw std::invalid_argument where what follows cannot be.
  void check_collective(const StreamPlace& place) const;
  void check_messages(const std::vector<Mail>& messages) const;
  /// Whether the GPU has room for kernels that wait for messages of `peer`, decided by both ranks
  /// together. Throws Error if that rank ends during the decision.
  bool has_room_for_messages(int peer);
  /// One thread at a time, with the device's context current. Throws Error.
  Traffic enqueue(const Collective& call, const CallHeader& header, const StreamPlace& place);
  /// Messages of which none waits for another, and which check_messages() takes, with ranks that
  /// there is room for. By one thread at a time, with the device's context current.
  void exchange(const std::vector<Mail>& messages, const StreamPlace& place);
  /// The event after the last of these two calls, on its stream; not null after the first call.
  const std::shared_ptr<const Event>& last_end() const { return last_end_; }
  /// Memory on this rank's device in which peers read and write buffers of collectives where they
  /// are. Collective. Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const Loan> lend(std::size_t num_bytes);
  bool can_lend() const { return turns_ == nullptr; }
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

  /// Whether streams wait for a turn of a rank that died before it ended the turn. They may wait
  /// until this process ends. From any thread. Throws Error.
  bool is_stuck() const { return find_dead_turn() >= 0; }

 private:
  Engine(Communicator& communicator, DeviceOrdinal device, const WaitLimits& limits,
         std::function<void(const std::string&)> report);

  /// The part of the parameters that all kernels share.
  GroupFrame frame() const;
  void launch_in_turns(PlannedCall& planned, StreamHandle stream);
  void take_turn(StreamHandle stream, std::uint64_t value);
  void wait_for_turn(std::uint64_t turn);
  unsigned blocks_of_messages(int peer);
  void look_at_peer(int peer, std::chrono::steady_clock::time_point deadline);
  /// A rank that died in a turn that this rank's streams wait for, or -1.
  int find_dead_turn() const;
  void check_alive();

  Communicator& communicator_;
  WaitLimits limits_;
  RecordExchange exchange_;
  std::shared_ptr<DeviceGroup> group_;
  const Kernels& kernels_;
  EventPool& events_;
  PlanCache plans_;
  CallBoard calls_;
  LentMemory lent_;
  std::shared_ptr<TurnEvents> turns_;  // if ranks take turns
  DeviceWatch watch_;
  std::uint64_t num_launches_ = 0;
  std::shared_ptr<const Event> last_end_;
  StreamOrder collectives_;
  std::map<int, StreamOrder> messages_;  // with each peer
  std::uint64_t num_turns_ = 0;
};

}  // namespace ringcomm::cuda
