#include "bindings/sparse_all_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensors.h"

namespace ringcomm {
namespace {

using Steps = Communicator::Steps;

// "sparse Float": distinguishes ranks with other dtypes or dense tensors.
ElementName sparse_name_of(const at::Tensor& tensor) {
  return element_name(std::string("sparse ") + c10::toString(tensor.scalar_type()));
}

// The rows of all ranks, in rank order, where rank r has counts[r].
at::Tensor all_gather_rows(Steps& steps, const at::Tensor& rows, const std::vector<int64_t>& counts,
                           ElementName name) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const at::Tensor mine = rows.contiguous();
  at::Tensor all = at::empty(sizes, rows.options());
  std::vector<void*> outputs;
  std::vector<std::size_t> output_bytes;
  int64_t begin_row = 0;
  for (const int64_t count : counts) {
    const at::Tensor share = all.narrow(0, begin_row, count);
    outputs.push_back(share.data_ptr());
    output_bytes.push_back(share.nbytes());
    begin_row += count;
  }
  const void* input = mine.data_ptr();
  steps.run({.op = OpKind::kAllGather,
             .element_name = name,
             .num_elems = mine.nbytes(),
             .inputs = &input,
             .outputs = outputs.data(),
             .output_elems = output_bytes.data()});
  return all;
}

// The number of entries of each rank; all tensors must have the same shape and sparse dimensions.
std::vector<int64_t> exchange_counts(Steps& steps, const at::Tensor& mine, int rank,
                                     int world_size) {
  std::vector<int64_t> words = mine.sizes().vec();
  words.push_back(mine.sparse_dim());
  words.push_back(mine._nnz());
  const at::Tensor all = all_gather_rows(
      steps, at::tensor(words, at::kLong).unsqueeze(0),
      std::vector<int64_t>(static_cast<std::size_t>(world_size), 1), sparse_name_of(mine));
  const auto num_words = static_cast<int64_t>(words.size());
  const at::Tensor shapes = all.narrow(1, 0, num_words - 1);
  std::vector<int64_t> counts;
  for (int64_t peer = 0; peer < world_size; ++peer) {
    if (!shapes[peer].equal(shapes[rank]))
      steps.raise_mismatch(
          "all_reduce", static_cast<int>(peer),
          c10::str("rank ", peer,
                   " has a different shape (or number of sparse dimensions) than rank ", rank,
                   ", whose tensor is ", mine.sizes(), " with ", mine.sparse_dim(),
                   " sparse dimensions"));
    counts.push_back(all[peer][num_words - 1].item<int64_t>());
  }
  return counts;
}

// Entries at one place are added up; 16-bit ones in float32.
at::Tensor added_up(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes) {
  const bool is_short = values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
  const at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(indices, is_short ? values.to(at::kFloat) : values, sizes)
          .coalesce();
  return is_short ? sum.to(values.scalar_type()) : sum;
}

void sum_over_ranks(Steps& steps, const at::Tensor& tensor, int rank, int world_size) {
  const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
  const at::Tensor mine = tensor.coalesce();
  const std::vector<int64_t> counts = exchange_counts(steps, mine, rank, world_size);
  if (std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count == 0; })) return;
  const at::Tensor indices =
      all_gather_rows(steps, mine._indices().t(), counts, sparse_name_of(mine));
  const at::Tensor values = all_gather_rows(steps, mine._values(), counts, sparse_name_of(mine));
  copy_back(tensor, added_up(indices.t(), values, tensor.sizes()));
}

}  // namespace

TensorCall sparse_all_reduce_call(const at::Tensor& tensor, const c10d::ReduceOp& op, int rank,
                                  int world_size) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "ringcomm: all_reduce got a sparse tensor on ",
                    tensor.device(), "; it supports sparse tensors on the CPU only");
  TORCH_CHECK_NOT_IMPLEMENTED(op == c10d::ReduceOp::SUM,
                              "ringcomm: all_reduce of sparse tensors supports ReduceOp.SUM only");
  TensorCall item;
  item.kept.push_back(tensor);
  item.profiled.push_back(tensor);
  item.sequence = [tensor, rank, world_size](Steps& steps) {
    sum_over_ranks(steps, tensor, rank, world_size);
  };
  return item;
}

}  // namespace ringcomm
