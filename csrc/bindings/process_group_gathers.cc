// The calls that only move, and of which every rank gets the same: broadcast, all_gather.

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
  check_shares(outputs, getSize(), input, "all_gather");
  TensorCall item;
  item.call = {.op = OpKind::kAllGather,
               .element_name = element_name_of(input),
               .num_elems = input.nbytes()};
  add_outputs(outputs, 1, item);
  item.inputs = {readable(input, item)};
  return item;
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::allgather(
    std::vector<std::vector<at::Tensor>>& outputTensors, std::vector<at::Tensor>& inputTensors,
    const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only_tensor(inputTensors, "all_gather");
  const std::vector<at::Tensor>& outputs = *only_list(outputTensors, true, "all_gather");
  std::vector<TensorCall> calls;
  calls.push_back(all_gather_list_call(outputs, input));
  return start(c10d::OpType::ALLGATHER, "ringcomm:all_gather", std::move(calls), outputs,
               opts.timeout, opts.asyncOp);
}

// outputTensorLists[rank][i] is what inputTensors[i] of that rank holds.
ProcessGroupRingcomm::Work ProcessGroupRingcomm::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputTensorLists, std::vector<at::Tensor>& inputTensors,
    const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputTensorLists.size() == static_cast<std::size_t>(getSize()),
                    "ringcomm: all_gather_coalesced needs one list of outputs for each of the ",
                    getSize(), " ranks, got ", outputTensorLists.size());
  for (const std::vector<at::Tensor>& outputs : outputTensorLists)
    TORCH_CHECK_VALUE(outputs.size() == inputTensors.size(), "ringcomm: all_gather_coalesced got ",
                      inputTensors.size(), " inputs, and a list of ", outputs.size(), " outputs");
  std::vector<TensorCall> calls;
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < inputTensors.size(); ++i) {
    check_tensor(inputTensors[i], "all_gather_coalesced");
    std::vector<at::Tensor> of_ranks;
    for (const std::vector<at::Tensor>& outputs : outputTensorLists) of_ranks.push_back(outputs[i]);
    calls.push_back(all_gather_list_call(of_ranks, inputTensors[i]));
    results.insert(results.end(), of_ranks.begin(), of_ranks.end());
  }
  return start(c10d::OpType::ALLGATHER_COALESCED, "ringcomm:all_gather", std::move(calls),
               std::move(results), opts.timeout, opts.asyncOp);
}

}  // namespace ringcomm
