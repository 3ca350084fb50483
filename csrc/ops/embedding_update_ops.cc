#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/sort.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/weight_update.h"

// embedding_sgd_update_ of ops/weight_update_ops.cc: each row that a token uses is updated once, by
// one thread, with the sum of its tokens' gradients.

namespace ringcomm {
namespace {

constexpr const char* kOp = "embedding_sgd_update_";

// One-dimensional int64.
at::Tensor checked_indices(const at::Tensor& indices, int64_t num_rows) {
  TORCH_CHECK_TYPE(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt,
                   "ringcomm: ", kOp, " needs indices in int64 or int32, got ",
                   indices.scalar_type());
  const at::Tensor flat = indices.to(at::kLong).reshape({-1}).contiguous();
  const auto* values = flat.const_data_ptr<std::int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < num_rows, "ringcomm: ", kOp, ": index ", i,
                      " is ", values[i], ", and the weight has ", num_rows, " rows");
  return flat;
}

void check_grad_out(const at::Tensor& grad_out, const at::Tensor& indices,
                    const at::Tensor& weight) {
  check_float(grad_out, "grad_out", kOp);
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  check_shape(grad_out, sizes, "grad_out", kOp);
}

/// The tokens of each row that has some, in the order of tokens; rows ascend.
class TokensByRow {
 public:
  struct Row {
    int64_t row = 0;
    int64_t begin = 0, end = 0;  // in the sorted tokens
  };

  TokensByRow(const at::Tensor& indices, int64_t padding_idx) {
    at::Tensor sorted;
    std::tie(sorted, tokens_) = at::sort(indices, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const auto* values = sorted.const_data_ptr<std::int64_t>();
    for (int64_t begin = 0, end = 0; begin < sorted.numel(); begin = end) {
      while (end < sorted.numel() && values[end] == values[begin]) ++end;
      if (values[begin] != padding_idx) rows_.push_back({values[begin], begin, end});
    }
  }

  const std::vector<Row>& rows() const { return rows_; }
  const std::int64_t* tokens() const { return tokens_.const_data_ptr<std::int64_t>(); }
  /// The index in rows() of the first row that is `row` or more.
  std::size_t find(int64_t row) const {
    const auto is_before = [](const Row& a, int64_t wanted) { return a.row < wanted; };
    return std::lower_bound(rows_.begin(), rows_.end(), row, is_before) - rows_.begin();
  }

 private:
  at::Tensor tokens_;
  std::vector<Row> rows_;
};

class EmbeddingUpdate {
 public:
  EmbeddingUpdate(const WeightArray& array, const WeightStep& step, const TokensByRow& by_row,
                  const at::Tensor& grad_out)
      : array_(array),
        step_(step),
        by_row_(by_row),
        grad_out_(grad_out.contiguous()),
        width_(array.weight().size(1)),
        grad_ops_(*host::find_grad_ops(float_dtype_of(grad_out))),
        of_token_(array.ops(float_dtype_of(grad_out))),
        of_sum_(array.ops(DType::kFloat32)) {}

  /// Rows without a token stay as they are.
  void run_touched() const {
    for_each(static_cast<int64_t>(by_row_.rows().size()), [&](int64_t begin, int64_t end) {
      std::vector<float> sums(width_);
      for (int64_t i = begin; i < end; ++i) update(by_row_.rows()[i], sums);
    });
  }

  void run_all() const {
    for_each(array_.weight().size(0), [&](int64_t begin, int64_t end) {
      std::vector<float> sums(width_);
      std::size_t next = by_row_.find(begin);
      for (int64_t row = begin; row < end; ++row) {
        const bool is_touched = next < by_row_.rows().size() && by_row_.rows()[next].row == row;
        update(is_touched ? by_row_.rows()[next++] : TokensByRow::Row{.row = row}, sums);
      }
    });
  }

 private:
  template <class Body>
  void for_each(int64_t count, const Body& body) const {
    at::parallel_for(0, count, std::max<int64_t>(1, kGrainElems / std::max<int64_t>(1, width_)),
                     body);
  }

  const void* grad_of(int64_t sorted_idx) const {
    return static_cast<const char*>(grad_out_.const_data_ptr()) +
           by_row_.tokens()[sorted_idx] * width_ * grad_out_.element_size();
  }

  void update(const TokensByRow::Row& row, std::vector<float>& sums) const {
    WeightRun run = array_.run(row.row * width_, width_);
    if (row.end - row.begin == 1) {
      run.grad = grad_of(row.begin);
      return of_token_.update(step_, run);
    }
    std::fill(sums.begin(), sums.end(), 0.0F);
    for (int64_t i = row.begin; i < row.end; ++i)
      grad_ops_.add(grad_of(i), static_cast<std::size_t>(width_), sums.data());
    run.grad = sums.data();
    of_sum_.update(step_, run);
  }

  const WeightArray& array_;
  const WeightStep& step_;
  const TokensByRow& by_row_;
  at::Tensor grad_out_;
  int64_t width_;
  const GradOps& grad_ops_;
  const WeightOps& of_token_;
  const WeightOps& of_sum_;
};

void embedding_sgd_update_(const at::Tensor& weight, const at::Tensor& indices,
                           const at::Tensor& grad_out, double lr, double weight_decay, double scale,
                           int64_t rounding_seed, const std::optional<at::Tensor>& low,
                           std::optional<double> clip_value, int64_t padding_idx) {
  const WeightArray array(weight, low, rounding_seed, true, kOp);
  const WeightStep step = weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, kOp);
  TORCH_CHECK_VALUE(padding_idx >= -1 && padding_idx < std::max<int64_t>(1, weight.size(0)),
                    "ringcomm: ", kOp, ": padding_idx must be one of the weight's ", weight.size(0),
                    " rows, or -1 for none, got ", padding_idx);
  check_grad_out(grad_out, indices, weight);
  const at::Tensor flat = checked_indices(indices, weight.size(0));
  array.check_writable({indices, grad_out});
  const TokensByRow by_row(flat, padding_idx);
  const EmbeddingUpdate update(array, step, by_row, grad_out.detach());
  if (weight_decay == 0)
    update.run_touched();
  else
    update.run_all();
  array.mark_written();
}

}  // namespace

TORCH_LIBRARY_IMPL(ringcomm, CPU, m) { m.impl("embedding_sgd_update_", embedding_sgd_update_); }

}  // namespace ringcomm
