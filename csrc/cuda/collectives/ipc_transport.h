#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "communicator/communicator.h"
#include "cuda/collectives/device_group.h"
#include "cuda/collectives/device_transport.h"
#include "cuda/collectives/device_watch.h"
#include "cuda/collectives/peer_allocations.h"
#include "host/wait.h"

namespace ringcomm::cuda {

/// A collective as it is launched.
struct PlannedCall {
  LaunchPlan plan;
  KernelCall call;
};

/// Collectives on GPU tensors, by kernels.
///
/// Calls of a group run in the order in which they are made, also on different streams.
class IpcTransport final : public DeviceTransport {
 public:
  /// Collective over the group, with the device's context current, in a relaxed capture mode: the
  /// first call of a group may be one that is captured. Throws Unavailable, Error. `limits` are
  /// those of a wait for another host. `report` is called from another thread with the error that
  /// ended the group. `make_sums` makes NCCL's, where switches add, or null.
  IpcTransport(Communicator& communicator, DeviceOrdinal device, const WaitLimits& limits,
               std::function<void(const std::string&)> report,
               const std::function<std::unique_ptr<DeviceTransport>()>& make_sums);
  /// Waits for what was launched.
  ~IpcTransport() override;

  const std::string& description() const override { return group_->description(); }

  void plan(Collective& call, bool is_captured) const override;
  void check_messages(const std::vector<P2pMessage>& messages) const override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  Traffic enqueue(const Collective& call, const StreamContext& stream) override;
  /// Of messages that check_messages() takes.
  void exchange(std::vector<P2pMessage> messages, const StreamContext& stream) override;
  std::shared_ptr<const Event> last_end() const override { return last_end_; }
  int ranks_per_device() const override { return group_->facts().max_ranks_per_device; }
  std::vector<Outcome> take_outcomes() override {
    return sums_ != nullptr ? sums_->take_outcomes() : std::vector<Outcome>{};
  }
  bool finds_mismatches() const override { return true; }
  /// Throws Error, std::invalid_argument.
  bool map(const void* data, std::size_t num_bytes) override;
  const char* why_staged() const override { return allocations_.why_staged(); }

  void abort() noexcept override {
    watch_.end_waits();
    if (sums_ != nullptr) sums_->abort();
  }
  bool may_be_aborted() const noexcept override {
    return (sums_ != nullptr && sums_->may_be_aborted()) ||
           __atomic_load_n(&group_->control().abort, __ATOMIC_ACQUIRE) != 0 ||
           communicator_.group_state()->is_aborted(/*asks=*/false);
  }

 private:
  /// The part of the parameters that all kernels share.
  GroupFrame frame() const;
  /// Valid until the next call of this function.
  PlannedCall& plan_call(const Collective& call, const HeaderWords& words);
  Traffic launch(const Collective& call, const HeaderWords& words, std::uint64_t number,
                 const StreamContext& stream);
  void follow_peers();
  void launch_shards(const Collective& call, const KernelCall& kernel_call, StreamHandle stream,
                     Traffic& traffic);
  void launch_messages(std::vector<P2pMessage>& messages, P2pCall& call, StreamHandle stream);

  Communicator& communicator_;
  WaitLimits limits_;
  RecordExchange exchange_;
  std::unique_ptr<DeviceGroup> group_;
  const Kernels& kernels_;
  EventPool& events_;
  RunningKernels& running_;
  std::map<HeaderWords, PlannedCall> plans_;  // of all_reduces
  PlannedCall other_plan_;                    // of the last other call
  PeerAllocations allocations_;
  std::unique_ptr<DeviceTransport> sums_;  // NCCL's; may be null
  DeviceWatch watch_;
  std::uint64_t num_launches_ = 0;  // of kernels that run at once
  std::uint64_t num_calls_ = 0;     // of these, and of those that graphs have captured
  bool has_captured_ = false;
  std::shared_ptr<const Event> last_end_;
};

}  // namespace ringcomm::cuda
