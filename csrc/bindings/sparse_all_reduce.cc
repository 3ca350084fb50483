// The sum of sparse tensors, as three collectives in a row.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings/process_group.h"
#include "bindings/python_errors.h"
#include "collectives/call.h"
#include "core/errors.h"

namespace ringcomm {
namespace {

// The rows of all ranks, in rank order, where rank r has counts[r]; and the number of the call.
std::pair<at::Tensor, std::uint64_t> gather_rows(Communicator& engine, const WaitLimits& limits,
                                                 const at::Tensor& rows,
                                                 const std::vector<int64_t>& counts,
                                                 at::ScalarType type) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const at::Tensor all = at::empty(sizes, rows.options());
  TensorCall item{.call = moving(OpKind::kAllGather, rows)};
  // "sparse Float" distinguishes ranks with other dtypes or dense tensors.
  item.call.element_name = element_name(c10::str("sparse ", type));
  item.inputs = {readable(rows, item)};
  add_outputs(all.split_with_sizes(counts), item);
  item.link();
  return {all, engine.run(std::move(item.call), limits)};
}

// The sum of the ranks' sparse (COO) tensors, or an undefined one if no rank has an entry. The
// ranks exchange their entries, whose number may differ, and add them in rank order, so that all
// have the same bits.
at::Tensor sparse_sum(Communicator& engine, const WaitLimits& limits, const at::Tensor& mine) {
  const int rank = engine.rank();
  std::vector<int64_t> counts(static_cast<std::size_t>(engine.world_size()), 1);
  // All tensors must have the same shape and sparse dimensions.
  std::vector<int64_t> words = mine.sizes().vec();
  words.insert(words.end(), {mine.sparse_dim(), mine._nnz()});
  const auto num_shape_words = static_cast<int64_t>(words.size()) - 1;
  const at::ScalarType type = mine.scalar_type();
  const auto [all, seq] =
      gather_rows(engine, limits, at::tensor(words, at::kLong).unsqueeze(0), counts, type);
  const at::Tensor shapes = all.narrow(1, 0, num_shape_words);
  for (int peer = 0; peer < engine.world_size(); ++peer) {
    if (!shapes[peer].equal(shapes[rank]))
      engine.failure().raise_mismatch(
          peer,
          c10::str("rank ", peer,
                   " has a different shape (or number of sparse dimensions) than rank ", rank,
                   ", whose tensor is ", mine.sizes(), " with ", mine.sparse_dim(),
                   " sparse dimensions"),
          {.op = "all_reduce",
           .seq = static_cast<std::int64_t>(seq),
           .description = c10::str("all_reduce #", seq)});
    counts[static_cast<std::size_t>(peer)] = all[peer][num_shape_words].item<int64_t>();
  }
  if (std::ranges::all_of(counts, [](int64_t count) { return count == 0; })) return {};
  const at::Tensor indices =
      gather_rows(engine, limits, mine._indices().t(), counts, type).first.t();
  const at::Tensor values = gather_rows(engine, limits, mine._values(), counts, type).first;
  // Entries at one place are added up; 16-bit ones in float32.
  const bool is_short = type == at::kHalf || type == at::kBFloat16;
  return at::_sparse_coo_tensor_unsafe(indices, is_short ? values.to(at::kFloat) : values,
                                       mine.sizes())
      .coalesce()
      .to(type);
}

}  // namespace

// In place: DDP calls it for sparse gradients of an embedding.
void ProcessGroupRingcomm::sparse_all_reduce(const at::Tensor& tensor,
                                             const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "ringcomm: all_reduce got a sparse tensor on ",
                    tensor.device(), "; it supports sparse tensors on the CPU only");
  TORCH_CHECK_NOT_IMPLEMENTED(opts.reduceOp == c10d::ReduceOp::SUM,
                              "ringcomm: all_reduce of sparse tensors supports ReduceOp.SUM only");
  const at::AutoDispatchBelowADInplaceOrView unseen_by_autograd;
  const WaitLimits limits = limits_of(opts.timeout);
  const std::shared_ptr<Communicator> engine = communicator();
  with_python_errors([&] {
    try {
      const at::Tensor sum = sparse_sum(*engine, limits, tensor.coalesce());
      if (sum.defined()) copy_back(tensor, sum);
    } catch (const Error&) {  // from a call, which has ended the group
      throw;
    } catch (const std::exception& error) {
      engine->abort(c10::str("all_reduce: ", error.what()));  // the other ranks have continued
      throw;
    }
  });
}

}  // namespace ringcomm
