#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "bindings/devices.h"
#include "collectives/trace.h"

namespace ringcomm {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// What a call of c10d is to its work, to profilers and to recordings.
struct CallInfo {
  c10d::OpType op_type;
  const char* title;  ///< "ringcomm:all_reduce"
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  bool is_async = false;
  std::optional<c10::Device> device = {};  ///< of a call without tensors
  int peer = -1;                           ///< of a message
  int tag = 0;                             ///< of a message

  CallInfo(c10d::OpType type, const char* name) : op_type(type), title(name) {}
  /// `options` are c10d's of a collective.
  template <class Options>
  CallInfo(c10d::OpType type, const char* name, const Options& options)
      : op_type(type), title(name), timeout(options.timeout), is_async(options.asyncOp) {}
};

/// The tensors of a reduce_scatter_update_all_gather: whole parameters and gradient, and this
/// rank's shard of the state, which is in fp32.
struct UpdateTensors {
  const at::Tensor& param;
  const at::Tensor& grad;
  std::optional<at::Tensor> master;
  /// By name, in the order of ShardUpdate's states.
  std::vector<std::pair<const char*, std::optional<at::Tensor>>> states;
};

/// A CPU tensor like torch.empty's, in memory that other processes of this host can map
/// (shm::SharedArena); it is freed with the last tensor on its storage. Throws torch's
/// OutOfMemoryError.
at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype);
/// Whether all elements of the tensor are in such memory of this process.
bool is_shared(const at::Tensor& tensor);

/// ringcomm as a backend of torch.distributed: c10d's calls in terms of the engine's. Names and
/// signatures are c10d's.
///
/// Synchronous calls (asyncOp false) run in the caller's thread and return a finished Work.
class ProcessGroupRingcomm final : public c10d::Backend {
 public:
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

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputTensors, Tensors& inputTensors,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputTensorLists, Tensors& inputTensors,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputTensors, TensorLists& inputTensors,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr gather(TensorLists& outputTensors, Tensors& inputTensors,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputTensors, TensorLists& inputTensors,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputTensors, Tensors& inputTensors,
                   const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& outputTensor, at::Tensor& inputTensor,
                        std::vector<int64_t>& outputSplitSizes,
                        std::vector<int64_t>& inputSplitSizes,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors& tensors, int srcRank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  /// A barrier that names missing ranks: rank 0 waits for a message from each rank and then answers
  /// all.
  ///
  /// It uses messages with tags of its own, so it changes neither the order of collectives nor, if
  /// it fails, the group. A receive without a message stays posted; it takes the message of a late
  /// rank, which also gets its answer. Only the death of a rank ends the group.
  ///
  /// Throws Error on rank 0, naming the first rank that did not arrive in time (all of them with
  /// `waitAllRanks`), and on each other rank when it arrives. These wait longer for rank 0's answer
  /// than rank 0 for them, so that rank 0 reports the failure first.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  bool supportsTensorAlloc(c10::DeviceIndex deviceIdx) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  /// Calls in between start as usual, and are also part of the work that endCoalescing() returns.
  /// Sends and receives of device tensors return no work and start together there. Those of CPU
  /// tensors need no coalescing, because none waits for another. So supportsCoalescing() is false
  /// without other devices, and each call has its own work.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

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
  void ring_all_reduce(const at::Tensor& tensor);
  /// all_reduce of SoftmaxStats, as rows of floats, by their merging; blocks.
  void merge_softmax_stats(const at::Tensor& input, const at::Tensor& output);
  /// Blocks. `spec` lacks what follows from the tensors.
  void reduce_update_gather(const UpdateTensors& tensors, UpdateSpec spec, bool is_average);

 private:
  WorkPtr start(const CallInfo& info, std::vector<TensorCall> calls, Tensors results);
  WorkPtr start(const CallInfo& info, TensorCall item, Tensors results);
  WorkPtr start_on(c10::Device device, const CallInfo& info, std::vector<TensorCall> calls,
                   Tensors results);
  WorkPtr start_message(c10d::OpType op_type, const char* title, const at::Tensor& tensor, int peer,
                        int tag);
  WorkPtr start_message_on(c10::Device device, const CallInfo& info, std::vector<TensorCall> calls,
                           Tensors results);
  trace::Event trace_event_of(const CallInfo& info, const std::vector<TensorCall>& calls) const;
  WorkPtr profiled(c10::Device device, const CallInfo& info, const std::vector<TensorCall>& calls,
                   const Tensors& results, c10::function_ref<WorkPtr()> body) const;
  /// Records a work for endCoalescing() inside a coalesced block.
  WorkPtr coalesced(WorkPtr work);
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;
  /// The rank as a number of the group; throws ValueError. `what` names it in the message.
  int checked_rank(int64_t rank, const char* what) const;
  std::shared_ptr<Devices> devices() const;

  c10::intrusive_ptr<GroupOptions> options_;
  std::atomic<std::uint64_t> num_monitored_barriers_ = 0;

  mutable std::mutex mutex_;  // guards all below, which several threads may use
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Devices> devices_;  // null without ringcomm._cuda
  bool is_coalescing_ = false;
  std::vector<WorkPtr> coalesced_works_;
  std::vector<DeviceMessageCall> coalesced_messages_;  // all on one device
  std::string last_split_name_;
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
};

}  // namespace ringcomm
