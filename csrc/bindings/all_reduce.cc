// c10d's all_reduce, of dense and of sparse tensors.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "bindings/process_group.h"
#include "collectives/op_kind.h"

namespace ringcomm {
namespace {

TensorCall all_reduce_call(const at::Tensor& input, const at::Tensor& output,
                           const c10d::ReduceOp& op) {
  TensorCall item;
  const bool is_in_place = input.is_same(output);
  const at::Tensor buffer = as_real(writable(output, item, is_in_place), op);
  item.call = reducing(OpKind::kAllReduce, buffer, op, "all_reduce");
  item.inputs = {is_in_place ? input_of(buffer, op, item)
                             : readable(premultiplied(input, op), item)};
  item.outputs = {buffer.data_ptr()};
  return item;
}

// The sum of the ranks' sparse (COO) tensors, or an undefined one if no rank has an entry. The
// ranks exchange their entries, whose number may differ, and add them in rank order, so that all
// have the same bits.
at::Tensor sparse_sum(Communicator::Steps& steps, const at::Tensor& mine, int rank,
                      int world_size) {
  // The rows of all ranks, in rank order, where rank r has counts[r].
  std::vector<int64_t> counts(static_cast<std::size_t>(world_size), 1);
  const auto all_gather = [&](const at::Tensor& rows) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const at::Tensor all = at::empty(sizes, rows.options());
    TensorCall item{.call = moving(OpKind::kAllGather, rows)};
    // "sparse Float" distinguishes ranks with other dtypes or dense tensors.
    item.call.element_name = element_name(c10::str("sparse ", mine.scalar_type()));
    item.inputs = {readable(rows, item)};
    add_outputs(all.split_with_sizes(counts), item);
    item.link();
    steps.run(item.call);
    return all;
  };
  // All tensors must have the same shape and sparse dimensions.
  std::vector<int64_t> words = mine.sizes().vec();
  words.insert(words.end(), {mine.sparse_dim(), mine._nnz()});
  const auto num_shape_words = static_cast<int64_t>(words.size()) - 1;
  const at::Tensor all = all_gather(at::tensor(words, at::kLong).unsqueeze(0));
  const at::Tensor shapes = all.narrow(1, 0, num_shape_words);
  for (int peer = 0; peer < world_size; ++peer) {
    if (!shapes[peer].equal(shapes[rank]))
      steps.raise_mismatch(
          "all_reduce", peer,
          c10::str("rank ", peer,
                   " has a different shape (or number of sparse dimensions) than rank ", rank,
                   ", whose tensor is ", mine.sizes(), " with ", mine.sparse_dim(),
                   " sparse dimensions"));
    counts[static_cast<std::size_t>(peer)] = all[peer][num_shape_words].item<int64_t>();
  }
  if (std::ranges::all_of(counts, [](int64_t count) { return count == 0; })) return {};
  const at::Tensor indices = all_gather(mine._indices().t()).t();
  const at::Tensor values = all_gather(mine._values());
  // Entries at one place are added up; 16-bit ones in float32.
  const at::ScalarType type = values.scalar_type();
  const bool is_short = type == at::kHalf || type == at::kBFloat16;
  return at::_sparse_coo_tensor_unsafe(indices, is_short ? values.to(at::kFloat) : values,
                                       mine.sizes())
      .coalesce()
      .to(type);
}

// In place: DDP calls it for sparse gradients of an embedding.
TensorCall sparse_all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op, int rank,
                                  int world_size) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "ringcomm: all_reduce got a sparse tensor on ",
                    tensor.device(), "; it supports sparse tensors on the CPU only");
  TORCH_CHECK_NOT_IMPLEMENTED(op == c10d::ReduceOp::SUM,
                              "ringcomm: all_reduce of sparse tensors supports ReduceOp.SUM only");
  TensorCall item;
  item.kept = item.profiled = {tensor};
  item.sequence = [tensor, rank, world_size](Communicator::Steps& steps) {
    const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
    const at::Tensor sum = sparse_sum(steps, tensor.coalesce(), rank, world_size);
    if (sum.defined()) copy_back(tensor, sum);
  };
  return item;
}

}  // namespace

bool ProcessGroupRingcomm::all_reduce_at_once(const at::Tensor& input, const at::Tensor& output,
                                              const c10d::ReduceOp& op,
                                              std::chrono::milliseconds timeout) {
  if (!fits_at_once(input, output, &op)) return false;
  run_at_once(reducing(OpKind::kAllReduce, output, op, "all_reduce"), input, output, timeout);
  return true;
}

WorkPtr ProcessGroupRingcomm::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && !opts.asyncOp &&
      all_reduce_at_once(tensors[0], tensors[0], opts.reduceOp, opts.timeout))
    return {};
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
    return start({c10d::OpType::_ALLREDUCE_SPARSE, "ringcomm:sparse_all_reduce", opts},
                 sparse_all_reduce_call(tensors[0], opts.reduceOp, getRank(), getSize()), tensors);
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  return start({c10d::OpType::ALLREDUCE, "ringcomm:all_reduce", opts},
               all_reduce_call(tensor, tensor, opts.reduceOp), tensors);
}

WorkPtr ProcessGroupRingcomm::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<TensorCall> calls;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, "all_reduce_coalesced");
    calls.push_back(all_reduce_call(tensor, tensor, opts.reduceOp));
  }
  return start({c10d::OpType::ALLREDUCE_COALESCED, "ringcomm:all_reduce", opts}, std::move(calls),
               tensors);
}

void ProcessGroupRingcomm::all_reduce_into(const at::Tensor& input, const at::Tensor& output,
                                           const c10d::ReduceOp& op, void (*adjust)(Collective&)) {
  check_tensor(input, "all_reduce");
  check_tensor(output, "all_reduce");
  TensorCall item = all_reduce_call(input, output, op);
  if (adjust != nullptr) adjust(item.call);
  start({c10d::OpType::ALLREDUCE, "ringcomm:all_reduce"}, std::move(item), {output});
}

}  // namespace ringcomm
