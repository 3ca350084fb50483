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
  void check_collective(StreamHandle stream) const;
  void check_messages(const std::vector<Mail>& messages) const;
  /// Whether the GPU has room for kernels that wait for messages of `peer`, as both ranks see it.
  /// Throws Error where that rank ends while it decides.
  bool has_room_for_messages(int peer);
  /// By one thread at a time. Throws Error.
  Traffic enqueue(const Collective& call, const CallHeader& header, StreamHandle stream);
  /// Messages of which none waits for another, and which check_messages() takes, with ranks that
  /// there is room for.
  void exchange(const std::vector<Mail>& messages, StreamHandle stream);
  /// Memory on this rank's device in which peers read and write buffers of all_reduce where they
  /// lie. Collective; kept as long as this engine, and this rank's part as long as what is
  /// returned. Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const DeviceMemory> lend(std::size_t num_bytes);

  /// Whether what is enqueued there is captured in a graph.
  bool is_captured(StreamHandle stream) const;
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

  template <class Call>
  Call new_call() const;
  std::uint64_t place_of(const void* data, std::size_t num_bytes) const;
  void launch_in_turns(const LaunchPlan& plan, KernelCall& call, StreamHandle stream);
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
  Kernels& kernels_;
  CallBoard calls_;
  std::shared_ptr<TurnEvents> turns_;  // where ranks take turns
  DeviceWatch watch_;
  std::vector<std::shared_ptr<const Segment>> lent_;
  std::unique_ptr<DeviceMemory> lent_bases_;    // of all ranks' parts, for kernels
  std::unique_ptr<MappedHostMemory> lent_row_;  // kept, as giving it back waits for the GPU
  std::uint64_t num_launches_ = 0;
  StreamOrder collectives_;
  std::map<int, StreamOrder> messages_;  // with each peer
  std::uint64_t num_turns_ = 0;
};

}  // namespace ringcomm::cuda
