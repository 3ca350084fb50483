#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "bindings/work.h"
#include "collectives/communicator.h"

namespace ringcomm {

/// What a reduce_scatter_update_all_gather works on: parameters and gradient whole, and of the
/// state this rank's shard. In fp32 but for parameters and gradient.
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
  /// Collective over the group.
  ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const CommunicatorOptions& options, std::chrono::milliseconds timeout);
  ~ProcessGroupRingcomm() override;

  const std::string getBackendName() const override { return "ringcomm"; }
  /// The engine; throws once the group has been destroyed.
  std::shared_ptr<Communicator> communicator() const;

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
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

  // Not there yet; each says so.
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>&,
                                        std::vector<at::Tensor>&,
                                        const c10d::GatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>&,
                                         std::vector<std::vector<at::Tensor>>&,
                                         const c10d::ScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&,
                                               std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>&, std::vector<at::Tensor>&,
                                          const c10d::AllToAllOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override;

  void abort() override;
  void shutdown() override;

  /// An all_reduce around the ring whatever the group's algorithm; 0 slots or bytes take the
  /// group's.
  void ring_all_reduce(const at::Tensor& tensor, int64_t num_slots, int64_t slot_bytes);
  /// Blocks. `spec` lacks what follows from the tensors.
  void reduce_update_gather(const UpdateTensors& tensors, UpdateSpec spec, bool is_average);

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;

  Work start(c10d::OpType op_type, const char* title, std::vector<TensorCall> calls,
             std::vector<at::Tensor> results, std::chrono::milliseconds timeout, bool is_async);
  TensorCall all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  TensorCall all_gather_call(const at::Tensor& output, const at::Tensor& input) const;
  TensorCall reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceOp& op) const;
  Work start_p2p(P2pOp::Kind kind, const at::Tensor& tensor, int peer, int tag);
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;

  mutable std::mutex mutex_;  // guards communicator_, which several threads may end
  std::shared_ptr<Communicator> communicator_;
  std::chrono::milliseconds timeout_;
};

}  // namespace ringcomm
