#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "bindings/comms_event.h"
#include "bindings/devices.h"
#include "bindings/group_options.h"
#include "bindings/work.h"
#include "collectives/communicator.h"
#include "collectives/trace.h"

namespace ringcomm {

/// The tensors of a reduce_scatter_update_all_gather: whole parameters and gradient, and this
/// rank's shard of the state, which is in fp32.
struct UpdateTensors {
  const at::Tensor& param;
  const at::Tensor& grad;
  std::optional<at::Tensor> master;
  /// By name, in the order of ShardUpdate's states.
  std::vector<std::pair<const char*, std::optional<at::Tensor>>> states;
};

/// ringcomm as a backend of torch.distributed: c10d's calls in terms of the engine's. Names and
/// signatures are c10d's.
///
/// Synchronous calls (asyncOp false) run in the caller's thread and return a finished Work.
class ProcessGroupRingcomm final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// Collective over the group.
  ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<GroupOptions> options);
  ~ProcessGroupRingcomm() override;

  const std::string getBackendName() const override { return "ringcomm"; }
  /// The engine; throws once the group has been destroyed.
  std::shared_ptr<Communicator> communicator() const;

  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  const c10::intrusive_ptr<GroupOptions>& options() const { return options_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  /// A group of `ranks` of this one, made by them alone; null on other ranks. c10d calls it once
  /// for each type of device, and gets one group for all.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  void setSequenceNumberForGroup() override {}  // both sides count from 0
  uint64_t getSequenceNumberForGroup() override { return communicator()->next_seq(); }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputTensors,
                                           std::vector<at::Tensor>& inputTensors,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputTensorLists,
      std::vector<at::Tensor>& inputTensors, const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputTensors,
                                                std::vector<std::vector<at::Tensor>>& inputTensors,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& outputBuffer, at::Tensor& inputBuffer,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dstRank,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int srcRank,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputTensors,
                                        std::vector<at::Tensor>& inputTensors,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputTensors,
                                         std::vector<std::vector<at::Tensor>>& inputTensors,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputTensors,
                                          std::vector<at::Tensor>& inputTensors,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& outputTensor, at::Tensor& inputTensor,
                                               std::vector<int64_t>& outputSplitSizes,
                                               std::vector<int64_t>& inputSplitSizes,
                                               const c10d::AllToAllOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  bool supportsTensorAlloc(c10::DeviceIndex deviceIdx) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  /// Calls in between start as usual, and are also part of the work that endCoalescing() returns.
  /// Sends and receives of device tensors return no work and start together there. Those of CPU
  /// tensors need no coalescing, because none waits for another. So supportsCoalescing() is false
  /// without other devices, and each call has its own work.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  Work endCoalescing() override;

  /// The error that ended the group; SUCCESS while it has not ended.
  c10d::ErrorType getError() override;
  /// Both may be called again, and in any order.
  void abort() override;
  void shutdown() override;

  /// Creates the carrier of the device's tensors now, if there is one. torch calls it on all ranks
  /// of a group that is bound to devices.
  void eagerConnectSingleDevice(at::Device device) override;
  /// A device tensor in memory that the other ranks map. Collective; throws like
  /// Devices::lend().
  at::Tensor empty_shared_on(c10::Device device, at::IntArrayRef sizes, at::ScalarType dtype);
  /// A readable description of the transport of each device.
  std::map<std::string, std::string> device_transports();

  /// all_reduce whose input stays as it is; blocks.
  void all_reduce_into(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& op);
  /// An all_reduce around the ring whatever the group's algorithm; 0 slots or bytes take the
  /// group's.
  void ring_all_reduce(const at::Tensor& tensor, int64_t num_slots, int64_t slot_bytes);
  /// all_reduce of SoftmaxStats, as rows of floats, by their merging; blocks.
  void merge_softmax_stats(const at::Tensor& input, const at::Tensor& output);
  /// Blocks. `spec` lacks what follows from the tensors.
  void reduce_update_gather(const UpdateTensors& tensors, UpdateSpec spec, bool is_average);

 private:
  /// `device` is the device of a call without tensors.
  Work start(c10d::OpType op_type, const char* title, std::vector<TensorCall> calls,
             std::vector<at::Tensor> results, std::chrono::milliseconds timeout, bool is_async,
             std::optional<c10::Device> device = {});
  TensorCall all_reduce_call(const at::Tensor& input, const at::Tensor& output,
                             const c10d::ReduceOp& op) const;
  TensorCall all_gather_call(const at::Tensor& output, const at::Tensor& input) const;
  TensorCall all_gather_list_call(const std::vector<at::Tensor>& outputs,
                                  const at::Tensor& input) const;
  TensorCall reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceOp& op) const;
  Work start_p2p(P2pOp::Kind kind, const at::Tensor& tensor, int peer, int tag);
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;

  Work start_collective(c10d::OpType op_type, const char* title, std::vector<TensorCall> calls,
                        std::vector<at::Tensor> results, std::chrono::milliseconds timeout,
                        bool is_async, c10::Device device);
  Work start_message(P2pOp::Kind kind, const char* title, const at::Tensor& tensor, int peer,
                     int tag);
  Work start_device_message(P2pOp::Kind kind, const char* title, const at::Tensor& tensor, int peer,
                            int tag);
  std::shared_ptr<Devices> devices() const;
  CommsEvent event_of(const char* title) const;
  /// A call, under the name that profilers show.
  trace::Event trace_event_of(const char* title, const std::vector<TensorCall>& calls) const;
  Algorithm algorithm_of(const Collective& call, c10::Device device) const;
  /// Records a work for endCoalescing() inside a coalesced block.
  Work coalesced(Work work);

  c10::intrusive_ptr<GroupOptions> options_;
  std::atomic<std::uint64_t> num_monitored_barriers_ = 0;

  mutable std::mutex mutex_;  // guards all below, which several threads may use
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Devices> devices_;  // null without ringcomm._cuda
  bool is_coalescing_ = false;
  std::vector<Work> coalesced_works_;
  std::vector<DeviceMessageCall> coalesced_messages_;  // all on one device
  std::string last_split_name_;
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
};

}  // namespace ringcomm
