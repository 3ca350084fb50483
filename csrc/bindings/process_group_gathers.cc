// The calls that only move: broadcast, all_gather, gather, scatter, all_to_all.

#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>

#include "bindings/process_group.h"
#include "bindings/tensors.h"

namespace ringcomm {

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

}  // namespace ringcomm
