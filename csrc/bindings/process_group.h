#pragma once

#include <ATen/record_function.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/devices.h"
#include "collectives/call.h"
#include "collectives/trace.h"

namespace ringcomm {

/// Starts a call in the engine. Collectives that are not asynchronous run to their end, in this
/// thread if nothing is before them; they throw their error and return null, or a work if
/// torch_wants_works().
WorkPtr start_in_engine(const std::shared_ptr<Communicator>& communicator, const CallInfo& info,
                        const WaitLimits& limits, std::vector<TensorCall> calls, Tensors results);
/// Whether torch needs a work of every call: for a profiler, or to register those that a compiled
/// function may await.
inline bool torch_wants_works() {
  return at::hasCallbacks() || c10d::allow_inflight_collective_as_graph_input();
}
/// The titles of calls (CallInfo), by their numbers in a trace.
std::vector<std::string> call_titles();
/// All works that were started in a coalesced block, as one.
WorkPtr coalesced_work(int rank, std::vector<WorkPtr> works);
/// When Python ends: no future completes any more, because its continuations may be Python's.
void end_continuations();

/// A CPU tensor like torch.empty's, in memory that other processes of this host can map
/// (host::SharedArena). Throws torch's OutOfMemoryError.
at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType dtype);
/// Whether all elements of the tensor are in such memory of this process.
bool is_shared(const at::Tensor& tensor);

/// The store for another thread: with a connection of its own, where torch's stores have one. A
/// store that is written in Python is shared: it needs no clone(), and nothing would keep the
/// Python object of one.
c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store);

struct UpdateTensors;  // kernels/updates/torch_arguments.h

/// ringcomm as a backend of torch.distributed: c10d's calls, by c10d's names, in terms of the
/// engine's. Synchronous collectives (asyncOp false) of CPU tensors run in the caller's thread, as
/// a rule, and return no work, as torch allows.
class ProcessGroupRingcomm final : public c10d::Backend {
 public:
  /// Collective over the group.
  ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<GroupOptions> options);
  ~ProcessGroupRingcomm() override;

  /// Tells the other ranks that this one cannot make the group, and why. For one that has not
  /// tried.
  static void report_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             const std::vector<uint64_t>& global_ranks, const std::string& text);

  const std::string getBackendName() const override { return "ringcomm"; }
  /// The engine; throws once the group has been destroyed.
  std::shared_ptr<Communicator> communicator() const;
  /// Groups that are made over `store` while this one lives know the processes of its `ranks`,
  /// whose global ranks there are `global_ranks`, before these have arrived. Their construction
  /// ends with an error once `is_abandoned` returns true.
  void register_peers(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                      const std::vector<uint64_t>& global_ranks,
                      std::function<bool()> is_abandoned);

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
  uint64_t getSequenceNumberForGroup() override {
    const std::shared_ptr<Communicator> engine = communicator();
    return engine->next_seq() + engine->next_seq(true);
  }

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

  /// Throws Error on rank 0, naming the first rank that did not arrive in time (all of them with
  /// `waitAllRanks`), and on each other rank when it arrives. Changes neither the order of
  /// collectives nor, if it fails, the group: only the death of a rank ends that.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  bool supportsTensorAlloc(c10::DeviceIndex deviceIdx) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  /// Calls in between start as usual, and are also part of the work that endCoalescing() returns.
  /// Sends and receives of device tensors return no work and start together there. Those of CPU
  /// tensors never wait for another: without other devices supportsCoalescing() is false.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  /// The error that ended the group; SUCCESS while it has not ended.
  c10d::ErrorType getError() override;
  /// Both may be called again, and in any order.
  void abort() override;
  void shutdown() override { leave(/*is_asked=*/true); }

  /// Makes the transport of the device's tensors. torch calls it on all ranks of a group that is
  /// bound to devices.
  void eagerConnectSingleDevice(at::Device device) override;
  /// How many ranks share a device at most: Devices::connect().
  int ranks_per_device(at::Device device);
  /// A device tensor, and whether all ranks have mapped those of all. Collective; throws like
  /// Devices::map().
  std::pair<at::Tensor, bool> empty_shared_on(c10::Device device, at::IntArrayRef sizes,
                                              at::ScalarType dtype);

  /// c10d's allreduce into another tensor of the same shape, or in place: every all_reduce of one
  /// tensor is this one. `adjust` may change the engine's call.
  WorkPtr all_reduce(const at::Tensor& input, const at::Tensor& output,
                     const c10d::AllreduceOptions& opts,
                     void (*adjust)(Collective& call) = nullptr);
  /// Blocks. `spec` lacks what follows from the tensors.
  void reduce_update_gather(const UpdateTensors& tensors, UpdateSpec spec, bool is_average);

 private:
  /// Whether a synchronous call of these tensors, which may be one, can run without a work: they
  /// are contiguous, of one dtype and on one device, the engine has the reduction `op` of them, and
  /// no profiler or trace must see the call. Others take the way of start(), which also words what
  /// is wrong with them.
  bool fits_at_once(const at::Tensor& input, const at::Tensor& output,
                    const c10d::ReduceOp* op = nullptr) const;
  /// Runs it on a CPU, or enqueues it on another device's current stream; returns null. Pointers
  /// that `call` lacks are of equal shards, or of whole tensors.
  WorkPtr run_at_once(Collective&& call, const at::Tensor& input, const at::Tensor& output,
                      std::chrono::milliseconds timeout);
  void sparse_all_reduce(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
  /// `is_asked`: by torch.distributed, not by the end of the object, when Python may have ended.
  void leave(bool is_asked);
  void abort(const std::string& why);
  bool is_in_call();
  bool is_destroyed_or_failed();
  /// The way of all other calls: recorded, profiled, coalesced, to the engine or to a device.
  WorkPtr start(const CallInfo& info, std::vector<TensorCall> calls, Tensors results);
  WorkPtr start(const CallInfo& info, TensorCall item, Tensors results);
  WorkPtr start_on_device(c10::Device device, CallInfo info, std::vector<TensorCall> calls,
                          Tensors results);
  WorkPtr start_message(c10d::OpType op_type, const char* title, const at::Tensor& tensor, int peer,
                        int tag);
  recorder::Event trace_event_of(const CallInfo& info, const std::vector<TensorCall>& calls,
                                 c10::Device device = c10::kCPU) const;
  WorkPtr profiled(c10::Device device, const CallInfo& info, const std::vector<TensorCall>& calls,
                   const Tensors& results, c10::function_ref<WorkPtr()> body) const;
  /// Records a work for endCoalescing() inside a coalesced block.
  WorkPtr add_if_coalescing(WorkPtr work);
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;
  WaitLimits limits_of(std::chrono::milliseconds timeout) const;
  /// The rank as a number of the group; throws ValueError. `what` names it in the message.
  int checked_rank(int64_t rank, const char* what) const;
  std::shared_ptr<Devices> devices() const;

  c10::intrusive_ptr<GroupOptions> options_;
  std::atomic<std::uint64_t> num_monitored_barriers_ = 0;

  // Guards all below, which several threads may use, some with the GIL: nothing that may wait, or
  // take the GIL as the end of a tensor does, happens with it.
  mutable std::mutex mutex_;
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Devices> devices_;  // null without ringcomm._cuda
  std::atomic<bool> is_coalescing_ = false;
  std::vector<WorkPtr> coalesced_works_;
  std::vector<DeviceMessage> coalesced_messages_;  // all on one device
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
};

/// The backend of a group for the tensor's device. Throws ValueError unless it is ringcomm's.
c10::intrusive_ptr<ProcessGroupRingcomm> ringcomm_group_of(const std::string& group_name,
                                                           const at::Tensor& tensor,
                                                           const char* op);

}  // namespace ringcomm
