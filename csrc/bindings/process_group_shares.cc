// The calls in which each rank has something else for each other: gather, scatter, all_to_all.

#include <c10/util/Exception.h>

#include <cstdint>
#include <utility>

#include "bindings/process_group.h"
#include "bindings/tensors.h"

namespace ringcomm {

ProcessGroupRingcomm::Work ProcessGroupRingcomm::gather(
    std::vector<std::vector<at::Tensor>>& outputTensors, std::vector<at::Tensor>& inputTensors,
    const c10d::GatherOptions& opts) {
  const at::Tensor& input = only_tensor(inputTensors, "gather");
  const int root = checked_rank(opts.rootRank, getSize(), "the destination of gather");
  const auto* outputs = only_list(outputTensors, root == getRank(), "gather");
  TensorCall item;
  item.call = {.op = OpKind::kGather,
               .element_name = element_name_of(input),
               .root = root,
               .num_elems = input.nbytes()};
  std::vector<at::Tensor> results;
  if (outputs != nullptr) {
    check_shares(*outputs, getSize(), input, "gather");
    add_outputs(*outputs, 1, item);
    results = *outputs;
  }
  item.inputs = {readable(input, item)};
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::GATHER, "ringcomm:gather", std::move(calls), std::move(results),
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::scatter(
    std::vector<at::Tensor>& outputTensors, std::vector<std::vector<at::Tensor>>& inputTensors,
    const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only_tensor(outputTensors, "scatter");
  const int root = checked_rank(opts.rootRank, getSize(), "the source of scatter");
  const auto* inputs = only_list(inputTensors, root == getRank(), "scatter");
  TensorCall item;
  item.call = {.op = OpKind::kScatter,
               .element_name = element_name_of(output),
               .root = root,
               .num_elems = output.nbytes()};
  item.outputs = {Writable(output, item, false).buffer().data_ptr()};
  if (inputs != nullptr) {
    check_shares(*inputs, getSize(), output, "scatter");
    add_inputs(*inputs, 1, item);
  }
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::SCATTER, "ringcomm:scatter", std::move(calls), outputTensors,
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::alltoall(std::vector<at::Tensor>& outputTensors,
                                                          std::vector<at::Tensor>& inputTensors,
                                                          const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(!inputTensors.empty(), "ringcomm: all_to_all got no inputs");
  check_shares(inputTensors, getSize(), inputTensors[0], "all_to_all");
  check_shares(outputTensors, getSize(), inputTensors[0], "all_to_all");
  TensorCall item;
  item.call = {.op = OpKind::kAllToAll, .element_name = element_name_of(inputTensors[0])};
  add_inputs(inputTensors, 1, item);
  add_outputs(outputTensors, 1, item);
  item.take_even_size();
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::ALLTOALL, "ringcomm:all_to_all", std::move(calls), outputTensors,
               opts.timeout, opts.asyncOp);
}

ProcessGroupRingcomm::Work ProcessGroupRingcomm::alltoall_base(
    at::Tensor& outputTensor, at::Tensor& inputTensor, std::vector<int64_t>& outputSplitSizes,
    std::vector<int64_t>& inputSplitSizes, const c10d::AllToAllOptions& opts) {
  check_tensor(outputTensor, "all_to_all_single");
  check_tensor(inputTensor, "all_to_all_single");
  check_same_dtype(outputTensor, inputTensor, "all_to_all_single");
  TensorCall item;
  item.call = {.op = OpKind::kAllToAll, .element_name = element_name_of(inputTensor)};
  const at::Tensor input = plain(inputTensor);
  item.kept.push_back(input);
  item.profiled = {inputTensor};
  add_rows(input, inputSplitSizes, getSize(), "input", [&](void* data, std::size_t num_bytes) {
    item.inputs.push_back(data);
    item.input_elems.push_back(num_bytes);
  });
  const Writable output(outputTensor, item, false);
  add_rows(output.buffer(), outputSplitSizes, getSize(), "output",
           [&](void* data, std::size_t num_bytes) {
             item.outputs.push_back(data);
             item.output_elems.push_back(num_bytes);
           });
  item.take_even_size();
  std::vector<TensorCall> calls;
  calls.push_back(std::move(item));
  return start(c10d::OpType::ALLTOALL_BASE, "ringcomm:all_to_all", std::move(calls), {outputTensor},
               opts.timeout, opts.asyncOp);
}

}  // namespace ringcomm
