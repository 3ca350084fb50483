// c10d's collectives but all_reduce and barrier: checks of what users pass, and the engine's calls.

#include <c10/util/Exception.h>

#include <utility>

#include "bindings/process_group.h"
#include "collectives/call.h"

namespace ringcomm {
namespace {

void check_pair(const at::Tensor& output, const at::Tensor& input, const char* op) {
  check_tensor(output, op);
  check_tensor(input, op);
  check_same_dtype(output, input, op);
}

// One tensor per rank, of any sizes, and of the dtype of `reference`, or else of the first.
void check_shards(const Tensors& tensors, int world_size, const char* op,
                  const at::Tensor* reference = nullptr) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(world_size), "ringcomm: ", op,
                    " needs one tensor for each of the ", world_size, " ranks, got ",
                    tensors.size());
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, op);
    check_same_dtype(tensor, reference != nullptr ? *reference : tensors[0], op);
  }
}

// The one list of a list of lists; or null where it belongs to the root and this rank is not.
const Tensors* only_list(const TensorLists& lists, bool has_list, const char* op) {
  TORCH_CHECK_VALUE(
      lists.size() == (has_list ? 1 : 0), "ringcomm: ", op, " needs ",
      has_list ? "one list of tensors, one for each rank" : "a list of tensors at its root only",
      ", got ", lists.size(), " lists");
  return has_list ? &lists[0] : nullptr;
}

void check_as_many(const Tensors& outputs, const Tensors& inputs, const char* op) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ringcomm: ", op, " got ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs");
}

// Splits a contiguous tensor into parts of `splits` rows each, or into equal parts without splits,
// and adds each part's pointer and size in bytes. `what` names the tensor.
template <class Pointer>
void add_rows(const at::Tensor& buffer, at::IntArrayRef splits, int world_size, const char* what,
              PerRank<Pointer>& parts, PerRank<std::size_t>& num_bytes) {
  const auto* const op = "ringcomm: all_to_all_single";
  TORCH_CHECK_VALUE(buffer.dim() > 0, op, " splits its ", what,
                    " along dimension 0, which a scalar does not have");
  const int64_t num_rows = buffer.size(0);
  PerRank<int64_t> even;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(num_rows % world_size == 0, op, " cannot split the ", num_rows,
                      " rows of its ", what, " evenly for ", world_size,
                      " ranks; pass split sizes");
    even.assign(static_cast<std::size_t>(world_size), num_rows / world_size);
    splits = even;
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(world_size), op,
                    " needs one split size of its ", what, " for each of the ", world_size,
                    " ranks, got ", splits.size());
  const std::size_t row_bytes =
      num_rows == 0 ? 0 : buffer.nbytes() / static_cast<std::size_t>(num_rows);
  auto* data = static_cast<std::byte*>(buffer.data_ptr());
  int64_t rows_left = num_rows;
  for (const int64_t shard_rows : splits) {
    TORCH_CHECK_VALUE(shard_rows >= 0 && shard_rows <= rows_left, op, ": the split sizes of its ",
                      what, ", ", splits, ", do not fit its ", num_rows, " rows");
    parts.push_back(data);
    num_bytes.push_back(static_cast<std::size_t>(shard_rows) * row_bytes);
    data += num_bytes.back();
    rows_left -= shard_rows;
  }
  TORCH_CHECK_VALUE(rows_left == 0, op, ": the split sizes of its ", what, ", ", splits,
                    ", add up to ", num_rows - rows_left, ", but there are ", num_rows, " rows");
}

TensorCall reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                               const c10d::ReduceOp& op, int world_size) {
  check_pair(output, input, "reduce_scatter_tensor");
  TORCH_CHECK_VALUE(input.numel() == output.numel() * world_size,
                    "ringcomm: reduce_scatter_tensor into ", output.numel(), " elements over ",
                    world_size, " ranks needs an input of ", output.numel() * world_size,
                    " elements, got ", input.numel());
  TensorCall item;
  const at::Tensor buffer = as_real(writable(output, item), op);
  item.call = reducing(OpKind::kReduceScatter, buffer, op, "reduce_scatter_tensor");
  item.outputs = {buffer.data_ptr()};
  add_parts<const void*>(readable(premultiplied(input, op), item), output.nbytes(), world_size,
                         item.inputs);
  return item;
}

TensorCall all_gather_call(const at::Tensor& output, const at::Tensor& input, int world_size) {
  check_pair(output, input, "all_gather_into_tensor");
  TORCH_CHECK_VALUE(output.numel() == input.numel() * world_size,
                    "ringcomm: all_gather_into_tensor of ", input.numel(),
                    " elements per rank over ", world_size, " ranks needs an output of ",
                    input.numel() * world_size, " elements, got ", output.numel());
  TensorCall item{.call = moving(OpKind::kAllGather, input)};
  add_parts(writable(output, item).data_ptr(), input.nbytes(), world_size, item.outputs);
  item.inputs = {readable(input, item)};
  return item;
}

// A gather to the root, or an all_gather; `outputs` is null on ranks that get nothing.
TensorCall gather_call(OpKind op, const Tensors* outputs, const at::Tensor& input, int world_size,
                       int root = -1) {
  TensorCall item{.call = moving(op, input, root)};
  if (outputs != nullptr) {
    check_shards(*outputs, world_size, name_of(op), &input);
    add_outputs(*outputs, item);
  }
  item.inputs = {readable(input, item)};
  return item;
}

}  // namespace

// ---- The elements of the ranks become one

WorkPtr ProcessGroupRingcomm::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = checked_rank(opts.rootRank, "the destination of reduce");
  TensorCall item;
  const at::Tensor buffer =
      as_real(root == getRank() ? writable(tensor, item, true) : plain(tensor), opts.reduceOp);
  item.call = reducing(OpKind::kReduce, buffer, opts.reduceOp, "reduce", root);
  item.kept.push_back(buffer);
  item.profiled = {tensor};
  item.inputs = {input_of(buffer, opts.reduceOp, item)};
  item.outputs = {buffer.data_ptr()};
  return start({c10d::OpType::REDUCE, "ringcomm:reduce", opts}, std::move(item), tensors);
}

WorkPtr ProcessGroupRingcomm::_reduce_scatter_base(at::Tensor& outputBuffer,
                                                   at::Tensor& inputBuffer,
                                                   const c10d::ReduceScatterOptions& opts) {
  if (!opts.asyncOp && fits_at_once(inputBuffer, outputBuffer, &opts.reduceOp) &&
      inputBuffer.numel() == outputBuffer.numel() * getSize())
    return run_at_once(
        reducing(OpKind::kReduceScatter, outputBuffer, opts.reduceOp, "reduce_scatter_tensor"),
        inputBuffer, outputBuffer, opts.timeout);
  return start({c10d::OpType::_REDUCE_SCATTER_BASE, "ringcomm:_reduce_scatter_base", opts},
               reduce_scatter_call(outputBuffer, inputBuffer, opts.reduceOp, getSize()),
               {outputBuffer});
}

WorkPtr ProcessGroupRingcomm::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  check_as_many(outputs, inputs, "reduce_scatter_tensor_coalesced");
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(reduce_scatter_call(outputs[i], inputs[i], opts.reduceOp, getSize()));
  return start({c10d::OpType::COALESCED, "ringcomm:reduce_scatter_tensor_coalesced", opts},
               std::move(calls), outputs);
}

WorkPtr ProcessGroupRingcomm::reduce_scatter(Tensors& outputTensors, TensorLists& inputTensors,
                                             const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only_tensor(outputTensors, "reduce_scatter");
  const Tensors& inputs = *only_list(inputTensors, true, "reduce_scatter");
  check_shards(inputs, getSize(), "reduce_scatter", &output);
  TensorCall item;
  const at::Tensor buffer = as_real(writable(output, item), opts.reduceOp);
  item.call = reducing(OpKind::kReduceScatter, buffer, opts.reduceOp, "reduce_scatter");
  item.outputs = {buffer.data_ptr()};
  Tensors scaled;
  for (const at::Tensor& input : inputs) scaled.push_back(premultiplied(input, opts.reduceOp));
  add_inputs(scaled, item);
  return start({c10d::OpType::REDUCE_SCATTER, "ringcomm:reduce_scatter", opts}, std::move(item),
               outputTensors);
}

// ---- Every rank gets the same

WorkPtr ProcessGroupRingcomm::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  const int root = checked_rank(opts.rootRank, "the source of broadcast");
  TensorCall item{.call = moving(OpKind::kBroadcast, tensor, root)};
  if (!opts.asyncOp && fits_at_once(tensor, tensor))
    return run_at_once(std::move(item.call), tensor, tensor, opts.timeout);
  void* data = root == getRank() ? readable(tensor, item) : writable(tensor, item).data_ptr();
  item.profiled = {tensor};
  item.inputs = {data};
  item.outputs = {data};
  return start({c10d::OpType::BROADCAST, "ringcomm:broadcast", opts}, std::move(item), tensors);
}

WorkPtr ProcessGroupRingcomm::_allgather_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                                              const c10d::AllgatherOptions& opts) {
  if (!opts.asyncOp && fits_at_once(inputBuffer, outputBuffer) &&
      outputBuffer.numel() == inputBuffer.numel() * getSize())
    return run_at_once(moving(OpKind::kAllGather, inputBuffer), inputBuffer, outputBuffer,
                       opts.timeout);
  return start({c10d::OpType::_ALLGATHER_BASE, "ringcomm:_all_gather_base", opts},
               all_gather_call(outputBuffer, inputBuffer, getSize()), {outputBuffer});
}

WorkPtr ProcessGroupRingcomm::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
  check_as_many(outputs, inputs, "all_gather_into_tensor_coalesced");
  std::vector<TensorCall> calls;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    calls.push_back(all_gather_call(outputs[i], inputs[i], getSize()));
  return start({c10d::OpType::COALESCED, "ringcomm:all_gather_into_tensor_coalesced", opts},
               std::move(calls), outputs);
}

WorkPtr ProcessGroupRingcomm::allgather(TensorLists& outputTensors, Tensors& inputTensors,
                                        const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only_tensor(inputTensors, "all_gather");
  const Tensors* outputs = only_list(outputTensors, true, "all_gather");
  return start({c10d::OpType::ALLGATHER, "ringcomm:all_gather", opts},
               gather_call(OpKind::kAllGather, outputs, input, getSize()), *outputs);
}

// outputTensorLists[rank][i] is what inputTensors[i] of that rank holds.
WorkPtr ProcessGroupRingcomm::allgather_coalesced(TensorLists& outputTensorLists,
                                                  Tensors& inputTensors,
                                                  const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputTensorLists.size() == static_cast<std::size_t>(getSize()),
                    "ringcomm: all_gather_coalesced needs one list of outputs for each of the ",
                    getSize(), " ranks, got ", outputTensorLists.size());
  for (const Tensors& outputs : outputTensorLists)
    TORCH_CHECK_VALUE(outputs.size() == inputTensors.size(), "ringcomm: all_gather_coalesced got ",
                      inputTensors.size(), " inputs, and a list of ", outputs.size(), " outputs");
  std::vector<TensorCall> calls;
  Tensors results;
  for (std::size_t i = 0; i < inputTensors.size(); ++i) {
    check_tensor(inputTensors[i], "all_gather_coalesced");
    Tensors of_ranks;
    for (const Tensors& outputs : outputTensorLists) of_ranks.push_back(outputs[i]);
    calls.push_back(gather_call(OpKind::kAllGather, &of_ranks, inputTensors[i], getSize()));
    results.insert(results.end(), of_ranks.begin(), of_ranks.end());
  }
  return start({c10d::OpType::ALLGATHER_COALESCED, "ringcomm:all_gather", opts}, std::move(calls),
               std::move(results));
}

// ---- Each rank has something else for each other

WorkPtr ProcessGroupRingcomm::gather(TensorLists& outputTensors, Tensors& inputTensors,
                                     const c10d::GatherOptions& opts) {
  const at::Tensor& input = only_tensor(inputTensors, "gather");
  const int root = checked_rank(opts.rootRank, "the destination of gather");
  const Tensors* outputs = only_list(outputTensors, root == getRank(), "gather");
  return start({c10d::OpType::GATHER, "ringcomm:gather", opts},
               gather_call(OpKind::kGather, outputs, input, getSize(), root),
               outputs != nullptr ? *outputs : Tensors{});
}

WorkPtr ProcessGroupRingcomm::scatter(Tensors& outputTensors, TensorLists& inputTensors,
                                      const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only_tensor(outputTensors, "scatter");
  const int root = checked_rank(opts.rootRank, "the source of scatter");
  const Tensors* inputs = only_list(inputTensors, root == getRank(), "scatter");
  TensorCall item{.call = moving(OpKind::kScatter, output, root)};
  item.outputs = {writable(output, item).data_ptr()};
  if (inputs != nullptr) {
    check_shards(*inputs, getSize(), "scatter", &output);
    add_inputs(*inputs, item);
  }
  return start({c10d::OpType::SCATTER, "ringcomm:scatter", opts}, std::move(item), outputTensors);
}

WorkPtr ProcessGroupRingcomm::alltoall(Tensors& outputTensors, Tensors& inputTensors,
                                       const c10d::AllToAllOptions& opts) {
  check_shards(inputTensors, getSize(), "all_to_all");
  check_shards(outputTensors, getSize(), "all_to_all", &inputTensors[0]);
  TensorCall item{.call = moving(OpKind::kAllToAll, inputTensors[0])};
  add_inputs(inputTensors, item);
  add_outputs(outputTensors, item);
  item.take_even_size();
  return start({c10d::OpType::ALLTOALL, "ringcomm:all_to_all", opts}, std::move(item),
               outputTensors);
}

WorkPtr ProcessGroupRingcomm::alltoall_base(at::Tensor& outputTensor, at::Tensor& inputTensor,
                                            std::vector<int64_t>& outputSplitSizes,
                                            std::vector<int64_t>& inputSplitSizes,
                                            const c10d::AllToAllOptions& opts) {
  check_pair(outputTensor, inputTensor, "all_to_all_single");
  TensorCall item{.call = moving(OpKind::kAllToAll, inputTensor)};
  const bool is_at_once = !opts.asyncOp && fits_at_once(inputTensor, outputTensor);
  if (!is_at_once) readable(inputTensor, item);
  add_rows(is_at_once ? inputTensor : item.kept.back(), inputSplitSizes, getSize(), "input",
           item.inputs, item.input_elems);
  add_rows(is_at_once ? outputTensor : writable(outputTensor, item), outputSplitSizes, getSize(),
           "output", item.outputs, item.output_elems);
  item.take_even_size();
  if (is_at_once) {
    item.link();
    return run_at_once(std::move(item.call), inputTensor, outputTensor, opts.timeout);
  }
  return start({c10d::OpType::ALLTOALL_BASE, "ringcomm:all_to_all", opts}, std::move(item),
               {outputTensor});
}

}  // namespace ringcomm
