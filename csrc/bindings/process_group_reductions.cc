// The calls in which the elements of the ranks become one: all_reduce, reduce, reduce_scatter.

#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>

#include "bindings/premul_sum.h"
#include "bindings/process_group.h"
#include "bindings/sparse_all_reduce.h"
#include "bindings/tensors.h"
#include "reduce/softmax_merge.h"

namespace ringcomm {
namespace {

// The input of a call that writes into `buffer`: `buffer` itself, or a copy times a factor.
const void* input_of(const at::Tensor& buffer, const c10d::ReduceOp& op, TensorCall& item) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return buffer.data_ptr();
  return readable(premultiplied(buffer, op), item);
}

}  // namespace

TensorCall ProcessGroupRingcomm::all_reduce_call(const at::Tensor& input, const at::Tensor& output,
                                                 const c10d::ReduceOp& op) const {
  TensorCall item;
  const bool is_in_place = input.is_same(output);
  const at::Tensor buffer = as_real(Writable(output, item, is_in_place).buffer(), op);
  item.call = {.op = OpKind::kAllReduce,
               .dtype = reduced_dtype(buffer, "all_reduce"),
               .reduction = reduction_of(op, "all_reduce"),
               .num_elems = num_elems_of(buffer)};
  item.inputs = {is_in_place ? input_of(buffer, op, item)
                             : readable(premultiplied(input, op), item)};
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
  calls.push_back(all_reduce_call(tensor, tensor, opts.reduceOp));
  return start(c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", std::move(calls), tensors,
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<TensorCall> calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce_coalesced");
    calls.push_back(all_reduce_call(tensor, tensor, opts.reduceOp));
  }
  return start(c10d::OpType::ALLREDUCE_COALESCED, "ringcomm:all_reduce", std::move(calls), tensors,
               opts.timeout, opts.asyncOp);
}

void ProcessGroupRingcomm::all_reduce_into(const at::Tensor& input, const at::Tensor& output,
                                           const c10d::ReduceOp& op) {
  check_tensor(input, "all_reduce");
  check_tensor(output, "all_reduce");
  std::vector<TensorCall> calls;
  calls.push_back(all_reduce_call(input, output, op));
  start(c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", std::move(calls), {output},
        options_->timeout, false);
}

void ProcessGroupRingcomm::ring_all_reduce(const at::Tensor& tensor, int64_t num_slots,
                                           int64_t slot_bytes) {
  check_tensor(tensor, "ring_all_reduce_");
  std::vector<TensorCall> calls;
  calls.push_back(all_reduce_call(tensor, tensor, c10d::ReduceOp::SUM));
  TORCH_CHECK_VALUE(num_slots >= 0 && num_slots <= UINT32_MAX && slot_bytes >= 0,
                    "ringcomm: ring_all_reduce_ got num_slots=", num_slots,
                    " and slot_bytes=", slot_bytes);
  calls[0].call.algorithm = Algorithm::kRing;
  calls[0].call.ring_num_slots = static_cast<std::uint32_t>(num_slots);
  calls[0].call.ring_slot_bytes = static_cast<std::uint64_t>(slot_bytes);
  start(c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", std::move(calls), {tensor},
        options_->timeout, false);
}

void ProcessGroupRingcomm::merge_softmax_stats(const at::Tensor& input, const at::Tensor& output) {
  std::vector<TensorCall> calls;
  calls.push_back(all_reduce_call(input, output, c10d::ReduceOp::SUM));
  calls[0].call.dtype = DType::kSoftmaxStats;
  calls[0].call.reduction = Reduction::kMerge;
  calls[0].call.num_elems = num_elems_of(input) / kNumSoftmaxStats;
  start(c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", std::move(calls), {output},
        options_->timeout, false);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::reduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = checked_rank(opts.rootRank, getSize(), "the destination of reduce");
  TensorCall item;
  const bool is_root = root == getRank();
  const at::Tensor buffer =
      as_real(is_root ? Writable(tensor, item, true).buffer() : plain(tensor), opts.reduceOp);
  item.call = {.op = OpKind::kReduce,
               .dtype = reduced_dtype(buffer, "reduce"),
               .reduction = reduction_of(opts.reduceOp, "reduce"),
               .root = root,
               .num_elems = num_elems_of(buffer)};
  item.kept.push_back(buffer);
  item.profiled = {tensor};
  item.inputs = {input_of(buffer, opts.reduceOp, item)};
  item.outputs = {buffer.data_ptr()};
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::REDUCE, "ringcomm:reduce", std::move(calls), tensors, opts.timeout,
               opts.asyncOp);
}

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
  void* data = const_cast<void*>(readable(premultiplied(input, op), item));
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
  const std::vector<at::Tensor>& inputs = *only_list(inputTensors, true, "reduce_scatter");
  check_shares(inputs, getSize(), output, "reduce_scatter");
  TensorCall item;
  const at::Tensor buffer = as_real(Writable(output, item, false).buffer(), opts.reduceOp);
  item.call = {.op = OpKind::kReduceScatter,
               .dtype = reduced_dtype(buffer, "reduce_scatter"),
               .reduction = reduction_of(opts.reduceOp, "reduce_scatter"),
               .num_elems = num_elems_of(buffer)};
  item.outputs = {buffer.data_ptr()};
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& input : inputs) scaled.push_back(premultiplied(input, opts.reduceOp));
  add_inputs(scaled, buffer.element_size(), item);
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::REDUCE_SCATTER, "ringcomm:reduce_scatter", std::move(calls),
               outputTensors, opts.timeout, opts.asyncOp);
}

}  // namespace ringcomm
