#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "bindings/tensors.h"

namespace ringcomm {
namespace {

// The all-reduce of one tensor as a sequence of the engine's calls.
class SparseSum {
 public:
  SparseSum(Communicator::Steps& steps, at::Tensor mine, int rank, int world_size)
      : steps_(steps),
        mine_(std::move(mine)),
        rank_(rank),
        counts_(static_cast<std::size_t>(world_size), 1) {}

  // The sum, or an undefined tensor if no rank has an entry.
  at::Tensor run() {
    exchange_counts();
    if (std::ranges::all_of(counts_, [](int64_t count) { return count == 0; })) return {};
    const at::Tensor indices = all_gather(mine_._indices().t()).t();
    const at::Tensor values = all_gather(mine_._values());
    // Entries at one place are added up; 16-bit ones in float32.
    const at::ScalarType type = values.scalar_type();
    const bool is_short = type == at::kHalf || type == at::kBFloat16;
    return at::_sparse_coo_tensor_unsafe(indices, is_short ? values.to(at::kFloat) : values,
                                         mine_.sizes())
        .coalesce()
        .to(type);
  }

 private:
  // The number of entries of each rank; all tensors must have the same shape and sparse dimensions.
  void exchange_counts() {
    std::vector<int64_t> words = mine_.sizes().vec();
    words.push_back(mine_.sparse_dim());
    words.push_back(mine_._nnz());
    const auto num_words = static_cast<int64_t>(words.size());
    const at::Tensor all = all_gather(at::tensor(words, at::kLong).unsqueeze(0));
    const at::Tensor shapes = all.narrow(1, 0, num_words - 1);
    for (std::size_t peer = 0; peer < counts_.size(); ++peer) {
      const auto row = static_cast<int64_t>(peer);
      if (!shapes[row].equal(shapes[rank_]))
        steps_.raise_mismatch(
            "all_reduce", static_cast<int>(peer),
            c10::str("rank ", peer,
                     " has a different shape (or number of sparse dimensions) than rank ", rank_,
                     ", whose tensor is ", mine_.sizes(), " with ", mine_.sparse_dim(),
                     " sparse dimensions"));
      counts_[peer] = all[row][num_words - 1].item<int64_t>();
    }
  }

  // The rows of all ranks, in rank order, where rank r has counts_[r].
  at::Tensor all_gather(const at::Tensor& rows) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = std::accumulate(counts_.begin(), counts_.end(), int64_t{0});
    const at::Tensor mine = rows.contiguous();
    const at::Tensor all = at::empty(sizes, rows.options());
    std::vector<void*> outputs;
    std::vector<std::size_t> output_bytes;
    for (const at::Tensor& share : all.split_with_sizes(counts_)) {
      outputs.push_back(share.data_ptr());
      output_bytes.push_back(share.nbytes());
    }
    const void* input = mine.data_ptr();
    // "sparse Float" distinguishes ranks with other dtypes or dense tensors.
    steps_.run(
        {.op = OpKind::kAllGather,
         .element_name = element_name(std::string("sparse ") + c10::toString(mine_.scalar_type())),
         .num_elems = mine.nbytes(),
         .inputs = &input,
         .outputs = outputs.data(),
         .output_elems = output_bytes.data()});
    return all;
  }

  Communicator::Steps& steps_;
  at::Tensor mine_;
  int rank_;
  std::vector<int64_t> counts_;  // of rows: one each for what exchange_counts() gathers
};

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
  item.sequence = [tensor, rank, world_size](Communicator::Steps& steps) {
    const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
    const at::Tensor sum = SparseSum(steps, tensor.coalesce(), rank, world_size).run();
    if (sum.defined()) copy_back(tensor, sum);
  };
  return item;
}

}  // namespace ringcomm
