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
#include "collectives/cuda/call_board.h"
#include "collectives/cuda/device_group.h"
#include "collectives/cuda/device_watch.h"
#include "collectives/cuda/events.h"
#include "collectives/cuda/kernels.h"
#include "collectives/cuda/lent_memory.h"
#include "collectives/cuda/plan_cache.h"
#include "collectives/cuda/row_room.h"

namespace ringcomm::cuda {

/// Collectives of tensors on GPUs: each call becomes kernels on a stream of the caller's, and the
/// host goes on, but where ranks take turns on a device.
///
/// Calls of a group run in the order in which they are made, whatever their streams. What goes
/// wrong on the device is found by a thread (DeviceWatch) and ends the group.
class Engine {
 public:
  /// Collective over the group. Throws Unavailable, Error. `report` is told, from another thread,
  /// what ended the group.
  static std::unique_ptr<Engine> make(Communicator& communicator, DeviceOrdinal device,
                                      std::chrono::milliseconds timeout,
                                      std::function<void(const std::string&)> report);
  /// Waits for what was launched, unless is_stuck().
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::string& description() const { return group_->description(); }
  /// Bytes of staging on the device, of this rank.
  std::size_t staging_bytes() const { return group_->staging().layout.num_bytes(); }

  void plan(const Collective& call, CallHeader& header) const;
  /// Throw std::invalid_argument where what follows cannot be.
  void check_collective(const StreamPlace& place) const;
  void check_messages(const std::vector<Mail>& messages) const;
  /// Whether the GPU has room for kernels that wait for messages of `peer`, as both ranks see it.
  /// Throws Error where that rank ends while it decides.
  bool has_room_for_messages(int peer);
  /// By one thread at a time, with the device's context current. Throws Error.
  Traffic enqueue(const Collective& call, const CallHeader& header, const StreamPlace& place);
  /// Messages of which none waits for another, and which check_messages() takes, with ranks that
  /// there is room for. By one thread at a time, with the device's context current.
  void exchange(const std::vector<Mail>& messages, const StreamPlace& place);
  /// Behind the last of these two, on its stream; not null after one.
  const std::shared_ptr<const Event>& last_end() const { return last_end_; }
  /// Memory on this rank's device in which peers read and write buffers of all_reduce where they
  /// are. Collective. Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const Loan> lend(std::size_t num_bytes);

  /// How many clusters of so many blocks a RowLaunch of this group may have; 0: none, as some rank
  /// has no room or no such kernels. `max_active` of them run on this rank's GPU at a time.
  /// Collective when a number of blocks is first asked for. Throws Error.
  int row_clusters(unsigned cluster_blocks, int max_active);

  /// For ever: kernels that wait give up. From any thread.
  void abort() noexcept { watch_.end_waits(); }
  /// Whether they do, or one has by itself, or one of another rank. From any thread.
  bool may_have_given_up() const noexcept {
    return __atomic_load_n(&group_->control().abort, __ATOMIC_ACQUIRE) != 0 ||
           communicator_.members()->is_given_up(/*asks=*/false);
  }

  /// Whether streams wait for a turn that a rank has not ended before it died: they may wait as
  /// long as this process lives. From any thread. Throws Error.
  bool is_stuck() const { return find_dead_turn() >= 0; }

 private:
  Engine(Communicator& communicator, DeviceOrdinal device, std::chrono::milliseconds timeout,
         std::function<void(const std::string&)> report);

  /// What the parameters of all kernels have in common.
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
  RowRoom rows_;
  std::shared_ptr<TurnEvents> turns_;  // where ranks take turns
  DeviceWatch watch_;
  std::uint64_t num_launches_ = 0;
  std::shared_ptr<const Event> last_end_;
  StreamOrder collectives_;
  std::map<int, StreamOrder> messages_;  // with each peer
  std::uint64_t num_turns_ = 0;
};

}  // namespace ringcomm::cuda
