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
#include "cuda/collectives/device_carrier.h"
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
class Engine final : public DeviceCarrier {
 public:
  /// Collective over the group. Throws Unavailable, Error. `limits` apply to each wait of this host
  /// for another. `report` is called from another thread with the error that ended the group.
  static std::unique_ptr<Engine> make(Communicator& communicator, DeviceOrdinal device,
                                      const WaitLimits& limits,
                                      std::function<void(const std::string&)> report);
  /// Waits for what was launched, unless is_stuck().
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::string& description() const override { return group_->description(); }
  /// Bytes of this rank's staging on the device.
  std::size_t staging_bytes() const { return group_->staging().layout.num_bytes(); }

  void plan(const Collective& call, CallHeader& header) const override;
  void check_collective(const StreamPlace& place) const override;
  void check_messages(const std::vector<Mail>& messages) const override;
  /// Decided by both ranks together. Throws Error if the peer ends during the decision.
  bool has_room_for_messages(int peer) override;
  Traffic enqueue(const Collective& call, const CallHeader& header,
                  const StreamPlace& place) override;
  /// Messages that check_messages() takes, with ranks that there is room for. With the device's
  /// context current.
  void exchange(const std::vector<Mail>& messages, const StreamPlace& place) override;
  std::shared_ptr<const Event> last_end() const override { return last_end_; }
  bool finds_mismatches() const override { return true; }
  /// Throws Unavailable, Error, std::invalid_argument.
  std::shared_ptr<const Loan> lend(std::size_t num_bytes) override;
  bool can_lend() const override { return turns_ == nullptr; }
  std::shared_ptr<const Loan> borrow(std::size_t num_bytes, const StreamPlace& place) override;

  void abort() noexcept override { watch_.end_waits(); }
  bool may_have_given_up() const noexcept override {
    return __atomic_load_n(&group_->control().abort, __ATOMIC_ACQUIRE) != 0 ||
           communicator_.members()->is_given_up(/*asks=*/false);
  }

  /// For a turn of a rank that died before it ended the turn. Throws Error.
  bool is_stuck() const override { return find_dead_turn() >= 0; }

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
