#include "bindings/process_group.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "bindings/python_errors.h"
#include "bindings/sparse_all_reduce.h"
#include "bindings/store_adapter.h"
#include "bindings/tensors.h"

namespace ringcomm {
namespace {

// A deadline far enough not to matter and near enough to be added to a clock.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

std::size_t num_elems_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}

int checked_rank(int64_t rank, int world_size, const char* what) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "ringcomm: ", what, " is ", rank,
                    ", not a rank of a group of ", world_size);
  return static_cast<int>(rank);
}

// The same bits for c10d's complex tensors, which sum like pairs of reals.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK_VALUE(c10d::isComplexViewAsRealAllowed(op),
                    "ringcomm: complex tensors can be summed and averaged only");
  return at::view_as_real(tensor);
}

// A contiguous tensor with the same numbers in memory: also where a conjugate or negative view
// stores others than it shows.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// Elements that share a location cannot hold their results.
void check_no_overlap(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                    "ringcomm: an output of shape ", tensor.sizes(), " and strides ",
                    tensor.strides(),
                    " has several elements at one memory location (an expanded tensor?), which "
                    "cannot hold their results; pass a clone()");
}

// An output that the engine can write: the tensor itself, or a contiguous stand-in that finish()
// copies back.
class Writable {
 public:
  Writable(const at::Tensor& tensor, TensorCall& item, bool is_input_too)
      : buffer_(is_plain(tensor) ? tensor
                : is_input_too   ? plain(tensor)
                                 : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {
    check_no_overlap(tensor);
    item.kept.push_back(tensor);
    if (is_input_too) item.profiled.push_back(tensor);
    if (buffer_.is_same(tensor)) return;
    item.kept.push_back(buffer_);
    item.finish = [previous = std::move(item.finish), tensor, buffer = buffer_] {
      if (previous) previous();
      copy_back(tensor, buffer);
    };
  }
  const at::Tensor& buffer() const { return buffer_; }

 private:
  static bool is_plain(const at::Tensor& tensor) {
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  }

  at::Tensor buffer_;
};

// A contiguous tensor to read from, kept alive by the call.
const void* readable(const at::Tensor& tensor, TensorCall& item) {
  item.profiled.push_back(tensor);
  item.kept.push_back(plain(tensor));
  return item.kept.back().data_ptr();
}

std::byte* offset(void* data, std::size_t num_bytes) {
  return static_cast<std::byte*>(data) + num_bytes;
}

}  // namespace

ProcessGroupRingcomm::ProcessGroupRingcomm(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, const CommunicatorOptions& options,
                                           std::chrono::milliseconds timeout)
    : Backend(rank, size), timeout_(timeout) {
  StoreAdapter adapter(store);
  with_python_errors([&] {
    communicator_ = std::make_shared<Communicator>(adapter, rank, size, options,
                                                   std::min(timeout, kLongestTimeout));
  });
}

ProcessGroupRingcomm::~ProcessGroupRingcomm() { shutdown(); }

std::shared_ptr<Communicator> ProcessGroupRingcomm::communicator() const {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator = communicator_;
  }
  TORCH_CHECK_VALUE(communicator != nullptr, "ringcomm: this process group has been destroyed");
  return communicator;
}

void ProcessGroupRingcomm::abort() {
  const std::lock_guard lock(mutex_);
  if (communicator_ != nullptr) communicator_->abort("the process group was aborted");
}

void ProcessGroupRingcomm::shutdown() {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator.swap(communicator_);
  }
  if (communicator == nullptr) return;
  if (communicator->is_inherited()) {
    // In a forked child the group is the parent's; what must not be destroyed is leaked.
    new std::shared_ptr(std::move(communicator));
    return;
  }
  without_gil([&] { communicator.reset(); });
}

std::chrono::milliseconds ProcessGroupRingcomm::effective(std::chrono::milliseconds timeout) const {
  return std::min(timeout <= kNoTimeout ? timeout_ : timeout, kLongestTimeout);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start(c10d::OpType op_type, const char* title,
                                                       std::vector<TensorCall> calls,
                                                       std::vector<at::Tensor> results,
                                                       std::chrono::milliseconds timeout,
                                                       bool is_async) {
  const std::shared_ptr<Communicator> engine = communicator();
  auto work = c10::make_intrusive<CollectiveWork>(engine, op_type, title, std::move(calls),
                                                  std::move(results));
  if (is_async)
    CollectiveWork::submit(work, *engine, effective(timeout));
  else
    work->run(*engine, effective(timeout));
  return work;
}

// ---- all_reduce, reduce, broadcast, barrier

TensorCall ProcessGroupRingcomm::all_reduce_call(const at::Tensor& tensor,
                                                 const c10d::ReduceOp& op) const {
  TensorCall item;
  const at::Tensor buffer = as_real(Writable(tensor, item, true).buffer(), op);
  item.call = {.op = OpKind::kAllReduce,
               .dtype = reduced_dtype(buffer, "all_reduce"),
               .reduction = reduction_of(op, "all_reduce"),
               .num_elems = num_elems_of(buffer)};
  item.inputs = {buffer.data_ptr()};
  item.outputs = {buffer.data_ptr()};
  return item;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allreduce(std::vector<at::Tensor>& tensors,
                                                           const c10d::AllreduceOptions& opts) {
  std::vector<TensorCall> calls;
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) {
    calls.push_back(sparse_all_reduce_call(tensors[0], opts.reduceOp, getRank(), getSize()));
    return start(c10d::OpType::_ALLREDUCE_SPARSE, "ringcomm:sparse_all_reduce", std::move(calls),
                 tensors, opts.timeout, opts.asyncOp);
  }
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  calls.push_back(all_reduce_call(tensor, opts.reduceOp));
  return start(c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", std::move(calls), tensors,
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<TensorCall> calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce_coalesced");
    calls.push_back(all_reduce_call(tensor, opts.reduceOp));
  }
  return start(c10d::OpType::ALLREDUCE_COALESCED, "ringcomm:all_reduce", std::move(calls), tensors,
               opts.timeout, opts.asyncOp);
}

void ProcessGroupRingcomm::ring_all_reduce(const at::Tensor& tensor, int64_t num_slots,
                                           int64_t slot_bytes) {
  check_tensor(tensor, "ring_all_reduce_");
  std::vector<TensorCall> calls;
  calls.push_back(all_reduce_call(tensor, c10d::ReduceOp::SUM));
  TORCH_CHECK_VALUE(num_slots >= 0 && num_slots <= UINT32_MAX && slot_bytes >= 0,
                    "ringcomm: ring_all_reduce_ got num_slots=", num_slots,
                    " and slot_bytes=", slot_bytes);
  calls[0].call.algorithm = Algorithm::kRing;
  calls[0].call.ring_num_slots = static_cast<std::uint32_t>(num_slots);
  calls[0].call.ring_slot_bytes = static_cast<std::uint64_t>(slot_bytes);
  start(c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", std::move(calls), {tensor}, timeout_,
        false);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::reduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = checked_rank(opts.rootRank, getSize(), "the destination of reduce");
  TensorCall item;
  const bool is_root = root == getRank();
  const at::Tensor buffer =
      as_real(is_root ? Writable(tensor, item, true).buffer() : plain(tensor), opts.reduceOp);
  item.kept.push_back(buffer);
  item.call = {.op = OpKind::kReduce,
               .dtype = reduced_dtype(buffer, "reduce"),
               .reduction = reduction_of(opts.reduceOp, "reduce"),
               .root = root,
               .num_elems = num_elems_of(buffer)};
  item.profiled = {tensor};
  item.inputs = {buffer.data_ptr()};
  item.outputs = {buffer.data_ptr()};
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::REDUCE, "ringcomm:reduce", std::move(calls), tensors, opts.timeout,
               opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::broadcast(std::vector<at::Tensor>& tensors,
                                                           const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  TensorCall item;
  const int root = checked_rank(opts.rootRank, getSize(), "the source of broadcast");
  void* data = root == getRank() ? const_cast<void*>(readable(tensor, item))
                                 : Writable(tensor, item, false).buffer().data_ptr();
  item.call = {.op = OpKind::kBroadcast,
               .element_name = element_name_of(tensor),
               .root = root,
               .num_elems = tensor.nbytes()};
  item.profiled = {tensor};
  item.inputs = {data};
  item.outputs = {data};
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::BROADCAST, "ringcomm:broadcast", std::move(calls), tensors,
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::barrier(const c10d::BarrierOptions& opts) {
  std::vector<TensorCall> calls(1);
  return start(c10d::OpType::BARRIER, "ringcomm:barrier", std::move(calls), {}, opts.timeout,
               opts.asyncOp);
}

// ---- all_gather

TensorCall ProcessGroupRingcomm::all_gather_call(const at::Tensor& output,
                                                 const at::Tensor& input) const {
  check_tensor(output, "all_gather_into_tensor");
  check_tensor(input, "all_gather_into_tensor");
  check_same_dtype(output, input, "all_gather_into_tensor");
  TORCH_CHECK_VALUE(output.numel() == input.numel() * getSize(),
                    "ringcomm: all_gather_into_tensor of ", input.numel(),
                    " elements per rank over ", getSize(), " ranks needs an output of ",
                    input.numel() * getSize(), " elements, got ", output.numel());
  TensorCall item;
  item.call = {.op = OpKind::kAllGather,
               .element_name = element_name_of(input),
               .num_elems = input.nbytes()};
  void* data = Writable(output, item, false).buffer().data_ptr();
  item.inputs = {readable(input, item)};
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(getSize()); ++rank)
    item.outputs.push_back(offset(data, rank * input.nbytes()));
  return item;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::_allgather_base(
    at::Tensor& outputBuffer, at::Tensor& inputBuffer, const c10d::AllgatherOptions& opts) {
  std::vector<TensorCall> calls;
  calls.push_back(all_gather_call(outputBuffer, inputBuffer));
  return start(c10d::OpType::_ALLGATHER_BASE, "ringcomm:_all_gather_base", std::move(calls),
               {outputBuffer}, opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                    "ringcomm: all_gather_into_tensor_coalesced got ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs");
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(all_gather_call(outputs[i], inputs[i]));
  return start(c10d::OpType::COALESCED, "ringcomm:all_gather_into_tensor_coalesced",
               std::move(calls), outputs, opts.timeout, opts.asyncOp);
}

TensorCall ProcessGroupRingcomm::all_gather_list_call(const std::vector<at::Tensor>& outputs,
                                                      const at::Tensor& input) const {
  check_alike(outputs, static_cast<std::size_t>(getSize()), input, "all_gather");
  TensorCall item;
  item.call = {.op = OpKind::kAllGather,
               .element_name = element_name_of(input),
               .num_elems = input.nbytes()};
  for (const at::Tensor& output : outputs)
    item.outputs.push_back(Writable(output, item, false).buffer().data_ptr());
  item.inputs = {readable(input, item)};
  return item;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allgather(
    std::vector<std::vector<at::Tensor>>& outputTensors, std::vector<at::Tensor>& inputTensors,
    const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only_tensor(inputTensors, "all_gather");
  TORCH_CHECK_VALUE(outputTensors.size() == 1,
                    "ringcomm: all_gather takes one list of outputs, got ", outputTensors.size());
  std::vector<TensorCall> calls;
  calls.push_back(all_gather_list_call(outputTensors[0], input));
  return start(c10d::OpType::ALLGATHER, "ringcomm:all_gather", std::move(calls), outputTensors[0],
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputTensorLists, std::vector<at::Tensor>& inputTensors,
    const c10d::AllgatherOptions& opts) {
  const auto world_size = static_cast<std::size_t>(getSize());
  TORCH_CHECK_VALUE(outputTensorLists.size() == world_size,
                    "ringcomm: all_gather_coalesced takes a list of outputs per rank, ", world_size,
                    ", got ", outputTensorLists.size());
  std::vector<at::Tensor> results;
  for (const std::vector<at::Tensor>& of_rank : outputTensorLists) {
    TORCH_CHECK_VALUE(of_rank.size() == inputTensors.size(), "ringcomm: all_gather_coalesced got ",
                      inputTensors.size(), " inputs and ", of_rank.size(), " outputs for a rank");
    results.insert(results.end(), of_rank.begin(), of_rank.end());
  }
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < inputTensors.size(); ++i) {
    std::vector<at::Tensor> outputs;
    for (const std::vector<at::Tensor>& of_rank : outputTensorLists) outputs.push_back(of_rank[i]);
    check_tensor(inputTensors[i], "all_gather_coalesced");
    calls.push_back(all_gather_list_call(outputs, inputTensors[i]));
  }
  return start(c10d::OpType::ALLGATHER_COALESCED, "ringcomm:all_gather_coalesced", std::move(calls),
               std::move(results), opts.timeout, opts.asyncOp);
}

// ---- reduce_scatter

TensorCall ProcessGroupRingcomm::reduce_scatter_call(const at::Tensor& output,
                                                     const at::Tensor& input,
                                                     const c10d::ReduceOp& op) const {
  check_tensor(output, "reduce_scatter_tensor");
  check_tensor(input, "reduce_scatter_tensor");
  check_same_dtype(output, input, "reduce_scatter_tensor");
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(),
                    "ringcomm: reduce_scatter_tensor into ", output.numel(), " elements over ",
                    getSize(), " ranks needs an input of ", output.numel() * getSize(),
                    " elements, got ", input.numel());
  TensorCall item;
  const at::Tensor buffer = as_real(Writable(output, item, false).buffer(), op);
  item.call = {.op = OpKind::kReduceScatter,
               .dtype = reduced_dtype(buffer, "reduce_scatter_tensor"),
               .reduction = reduction_of(op, "reduce_scatter_tensor"),
               .num_elems = num_elems_of(buffer)};
  item.outputs = {buffer.data_ptr()};
  void* data = const_cast<void*>(readable(input, item));
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(getSize()); ++rank)
    item.inputs.push_back(offset(data, rank * output.nbytes()));
  return item;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::_reduce_scatter_base(
    at::Tensor& outputBuffer, at::Tensor& inputBuffer, const c10d::ReduceScatterOptions& opts) {
  std::vector<TensorCall> calls;
  calls.push_back(reduce_scatter_call(outputBuffer, inputBuffer, opts.reduceOp));
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, "ringcomm:_reduce_scatter_base",
               std::move(calls), {outputBuffer}, opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(),
                    "ringcomm: reduce_scatter_tensor_coalesced got ", inputs.size(), " inputs and ",
                    outputs.size(), " outputs");
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(reduce_scatter_call(outputs[i], inputs[i], opts.reduceOp));
  return start(c10d::OpType::COALESCED, "ringcomm:reduce_scatter_tensor_coalesced",
               std::move(calls), outputs, opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::reduce_scatter(
    std::vector<at::Tensor>& outputTensors, std::vector<std::vector<at::Tensor>>& inputTensors,
    const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only_tensor(outputTensors, "reduce_scatter");
  TORCH_CHECK_VALUE(inputTensors.size() == 1,
                    "ringcomm: reduce_scatter takes one list of inputs, got ", inputTensors.size());
  check_alike(inputTensors[0], static_cast<std::size_t>(getSize()), output, "reduce_scatter");
  TensorCall item;
  const at::Tensor buffer = as_real(Writable(output, item, false).buffer(), opts.reduceOp);
  item.call = {.op = OpKind::kReduceScatter,
               .dtype = reduced_dtype(buffer, "reduce_scatter"),
               .reduction = reduction_of(opts.reduceOp, "reduce_scatter"),
               .num_elems = num_elems_of(buffer)};
  item.outputs = {buffer.data_ptr()};
  for (const at::Tensor& input : inputTensors[0]) item.inputs.push_back(readable(input, item));
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::REDUCE_SCATTER, "ringcomm:reduce_scatter", std::move(calls),
               outputTensors, opts.timeout, opts.asyncOp);
}

// ---- point to point

ProcessGroupRingcomm::Work ProcessGroupRingcomm::start_p2p(P2pOp::Kind kind,
                                                           const at::Tensor& tensor, int peer,
                                                           int tag) {
  const bool is_send = kind == P2pOp::Kind::kSend;
  TORCH_CHECK_VALUE(peer != getRank(), "ringcomm: rank ", peer, " cannot ",
                    is_send ? "send to" : "receive from", " itself");
  TORCH_CHECK_VALUE(getSize() > 1, "ringcomm: there is nobody to receive from in a group of one");
  const auto op_type = is_send    ? c10d::OpType::SEND
                       : peer < 0 ? c10d::OpType::RECVANYSOURCE
                                  : c10d::OpType::RECV;
  const char* title = is_send    ? "ringcomm:send"
                      : peer < 0 ? "ringcomm:recvAnySource"
                                 : "ringcomm:recv";
  if (!is_send) check_no_overlap(tensor);
  const std::shared_ptr<Communicator> engine = communicator();
  auto work = c10::make_intrusive<P2pWork>(engine, op_type, title, tensor);
  P2pWork::post(work, *engine,
                {.kind = kind,
                 .peer = peer,
                 .tag = static_cast<std::uint32_t>(tag),
                 .timeout = effective(c10d::kUnsetTimeout)});
  return work;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::send(std::vector<at::Tensor>& tensors, int dstRank,
                                                      int tag) {
  return start_p2p(P2pOp::Kind::kSend, only_tensor(tensors, "send"),
                   checked_rank(dstRank, getSize(), "the destination of send"), tag);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::recv(std::vector<at::Tensor>& tensors, int srcRank,
                                                      int tag) {
  return start_p2p(P2pOp::Kind::kRecv, only_tensor(tensors, "recv"),
                   checked_rank(srcRank, getSize(), "the source of recv"), tag);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::recvAnysource(std::vector<at::Tensor>& tensors,
                                                               int tag) {
  return start_p2p(P2pOp::Kind::kRecv, only_tensor(tensors, "recv"), -1, tag);
}

// ---- not there yet

ProcessGroupRingcomm::Work ProcessGroupRingcomm::gather(std::vector<std::vector<at::Tensor>>&,
                                                        std::vector<at::Tensor>&,
                                                        const c10d::GatherOptions&) {
  not_there_yet("gather");
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::scatter(std::vector<at::Tensor>&,
                                                         std::vector<std::vector<at::Tensor>>&,
                                                         const c10d::ScatterOptions&) {
  not_there_yet("scatter");
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::alltoall_base(at::Tensor&, at::Tensor&,
                                                               std::vector<int64_t>&,
                                                               std::vector<int64_t>&,
                                                               const c10d::AllToAllOptions&) {
  not_there_yet("all_to_all_single");
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::alltoall(std::vector<at::Tensor>&,
                                                          std::vector<at::Tensor>&,
                                                          const c10d::AllToAllOptions&) {
  not_there_yet("all_to_all");
}

void ProcessGroupRingcomm::monitoredBarrier(const c10d::BarrierOptions&, bool) {
  not_there_yet("monitored_barrier");
}

}  // namespace ringcomm
