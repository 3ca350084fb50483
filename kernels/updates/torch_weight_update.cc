#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sort.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "kernels/updates/torch_arguments.h"

// torch.ops.ringcomm.*: in-place updates of weights, from their gradients or from the factors of
// these. The schemas of torch_adalomo.cc are here, too. Fakes and wrappers are in
// ringcomm/ops/weight_update_cuda.py, the formulas in docs/design/optim.md.

namespace ringcomm {
namespace {

void sgd_update_(const at::Tensor& weight, const at::Tensor& grad, double lr, double weight_decay,
                 double scale, int64_t rounding_seed, const std::optional<at::Tensor>& low,
                 std::optional<double> clip_value, int64_t first_elem) {
  constexpr const char* kOp = "sgd_update_";
  const WeightArray array(weight, low, rounding_seed, false, kOp);
  const WeightStep step = weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, kOp);
  check_first_elem(first_elem, kOp);
  const at::Tensor ordered = ordered_grad(grad, weight, kOp);
  array.check_writable({grad});
  const WeightOps& ops = array.ops(float_dtype_of(ordered));
  const auto* grads = static_cast<const char*>(ordered.const_data_ptr());
  at::parallel_for(0, array.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    WeightRun run = array.run(begin, end - begin);
    run.grad = grads + begin * ordered.element_size();
    run.first_elem += static_cast<std::uint64_t>(first_elem);
    ops.update(step, run);
  });
  array.mark_written();
}

constexpr const char* kLinearUpdate = "linear_sgd_update_";

// Blocks depend on the shape only and each belongs to one thread, so the result does not depend on
// the number of threads. Compared with one product of all rows (T = 512, fp32), blocks of 128 rows
// are 3 to 5 percent slower and blocks of 32 rows 20 percent; the update itself is hidden. 2 MiB of
// fp32 stay in the cache.
constexpr int64_t kBlockElems = int64_t{1} << 19;
constexpr int64_t kNumBlocks = 16, kMinRows = 128;

int64_t rows_per_block(int64_t num_rows, int64_t num_cols) {
  const int64_t as_fit = std::max<int64_t>(1, kBlockElems / std::max<int64_t>(1, num_cols));
  const int64_t half = std::max<int64_t>(1, (num_rows + 1) / 2);
  const int64_t wanted = std::max((num_rows + kNumBlocks - 1) / kNumBlocks, kMinRows);
  return std::min({wanted, half, as_fit});
}

// The gradient of a linear layer's weight is never materialized. Each block of the weight's rows is
// updated while its gradient is in the cache.
void linear_sgd_update_(const at::Tensor& weight, const at::Tensor& x, const at::Tensor& grad_out,
                        double lr, double weight_decay, double scale, int64_t rounding_seed,
                        const std::optional<at::Tensor>& low, std::optional<double> clip_value) {
  const WeightArray array(weight, low, rounding_seed, true, kLinearUpdate);
  const WeightStep step =
      weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, kLinearUpdate);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t num_rows = weight.size(0), num_cols = weight.size(1);
  const auto [tokens, token_grads] = tokens_of(weight, x, grad_out);
  array.check_writable({x, grad_out});
  const at::Tensor fp32_tokens = tokens.to(at::kFloat);
  const WeightOps& ops = array.ops(DType::kFloat32);
  const int64_t block_rows = rows_per_block(num_rows, num_cols);
  const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
  at::parallel_for(0, num_blocks, 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView in_this_thread;
    const at::Tensor buffer = at::empty({block_rows, num_cols}, at::kFloat);
    for (int64_t begin = first * block_rows; begin < std::min(num_rows, last * block_rows);
         begin += block_rows) {
      const int64_t count = std::min(block_rows, num_rows - begin);
      at::Tensor grad = buffer.narrow(0, 0, count);
      at::mm_out(grad, token_grads.narrow(1, begin, count).to(at::kFloat).t(), fp32_tokens);
      WeightRun run = array.run(begin * num_cols, count * num_cols);
      run.grad = grad.const_data_ptr();
      ops.update(step, run);
    }
  });
  array.mark_written();
}

constexpr const char* kEmbeddingUpdate = "embedding_sgd_update_";

// One-dimensional int64.
at::Tensor checked_indices(const at::Tensor& indices, int64_t num_rows) {
  const at::Tensor flat = indices.to(at::kLong).reshape({-1}).contiguous();
  const auto* values = flat.const_data_ptr<std::int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < num_rows, "ringcomm: ", kEmbeddingUpdate,
                      ": index ", i, " is ", values[i], ", and the weight has ", num_rows, " rows");
  return flat;
}

/// A row to update, and its tokens in the order of sorted indices.
struct TokensOfRow {
  int64_t row = 0;
  int64_t begin = 0, end = 0;
};

/// The rows that tokens use, ascending, or all rows. No token counts for padding_idx.
std::vector<TokensOfRow> rows_to_update(const at::Tensor& sorted_indices, int64_t padding_idx,
                                        int64_t num_rows, bool has_all) {
  std::vector<TokensOfRow> rows;
  int64_t next_row = 0;
  const auto add_untouched = [&](int64_t end_row) {
    for (; has_all && next_row < end_row; ++next_row) rows.push_back({.row = next_row});
  };
  const auto* values = sorted_indices.const_data_ptr<std::int64_t>();
  for (int64_t begin = 0, end = 0; begin < sorted_indices.numel(); begin = end) {
    while (end < sorted_indices.numel() && values[end] == values[begin]) ++end;
    if (values[begin] == padding_idx) continue;
    add_untouched(values[begin]);
    rows.push_back({values[begin], begin, end});
    next_row = values[begin] + 1;
  }
  add_untouched(num_rows);
  return rows;
}

// Each row is updated once, by one thread, with the sum of its tokens' gradients.
void embedding_sgd_update_(const at::Tensor& weight, const at::Tensor& indices,
                           const at::Tensor& grad_out, double lr, double weight_decay, double scale,
                           int64_t rounding_seed, const std::optional<at::Tensor>& low,
                           std::optional<double> clip_value, int64_t padding_idx) {
  const WeightArray array(weight, low, rounding_seed, true, kEmbeddingUpdate);
  const WeightStep step =
      weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, kEmbeddingUpdate);
  const int64_t num_rows = weight.size(0), width = weight.size(1);
  check_embedding(weight, indices, grad_out, padding_idx);
  const at::Tensor flat = checked_indices(indices, num_rows);
  array.check_writable({indices, grad_out});
  const auto [sorted, order] = at::sort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto* tokens = order.const_data_ptr<std::int64_t>();
  // Weight decay changes rows without a token, too.
  const std::vector<TokensOfRow> rows =
      rows_to_update(sorted, padding_idx, num_rows, weight_decay != 0);
  const at::Tensor grads = grad_out.detach().contiguous();
  const auto* grad_bytes = static_cast<const char*>(grads.const_data_ptr());
  const int64_t row_bytes = width * grads.element_size();
  const GradOps& grad_ops = grad_ops_of(grads);
  const WeightOps& of_token = array.ops(float_dtype_of(grads));
  const WeightOps& of_sum = array.ops(DType::kFloat32);
  const int64_t grain = std::max<int64_t>(1, kGrainElems / std::max<int64_t>(1, width));
  at::parallel_for(0, static_cast<int64_t>(rows.size()), grain, [&](int64_t first, int64_t last) {
    std::vector<float> sums(width);
    for (int64_t i = first; i < last; ++i) {
      const auto [row, begin, end] = rows[i];
      WeightRun run = array.run(row * width, width);
      if (end - begin == 1) {
        run.grad = grad_bytes + tokens[begin] * row_bytes;
        of_token.update(step, run);
        continue;
      }
      std::fill(sums.begin(), sums.end(), 0.0F);
      for (int64_t token = begin; token < end; ++token)
        grad_ops.add(grad_bytes + tokens[token] * row_bytes, static_cast<std::size_t>(width),
                     sums.data());
      run.grad = sums.data();
      of_sum.update(step, run);
    }
  });
  array.mark_written();
}

constexpr const char* kOptimizerUpdate = "optimizer_update_";

UpdateOp checked_update_op(const UpdateSpec& spec, DType grad_dtype) {
  try {
    return make_update_op(spec, grad_dtype);
  } catch (const std::invalid_argument& error) {  // which torch 2.15 makes a RuntimeError
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// The arithmetic of the fused update (csrc/bindings/fused_update.cc) without collectives.
void optimizer_update_(const at::Tensor& param, const at::Tensor& grad, at::TensorList states,
                       const std::optional<at::Tensor>& master, const std::string& optimizer,
                       at::ArrayRef<double> numbers, bool nesterov, int64_t step,
                       double grad_scale) {
  const UpdateTensors tensors = {param, grad, states, master};
  UpdateSpec spec = update_spec_of(tensors, optimizer, numbers, nesterov, step, grad_scale);
  const UpdateArrays whole = checked_arrays(
      tensors, spec, param.numel(),
      "of " + std::to_string(param.numel()) + " elements, as the parameters", kOptimizerUpdate);
  const UpdateOp op = checked_update_op(spec, float_dtype_of(grad));
  at::parallel_for(0, param.numel(), kGrainElems, [&](int64_t begin, int64_t end) {
    UpdateArrays part = whole;
    part.param = static_cast<char*>(whole.param) + begin * param.element_size();
    part.grad = static_cast<const char*>(whole.grad) + begin * grad.element_size();
    if (part.master != nullptr) part.master += begin;
    for (float*& state : part.states)
      if (state != nullptr) state += begin;
    op.apply(op.scalars, part, static_cast<std::size_t>(end - begin));
  });
  tensors.mark_written();
}

// (..., features) as (tokens, features).
at::Tensor flat_tokens(const at::Tensor& tensor, int64_t features, const char* name,
                       at::Device device) {
  check_float(tensor, name, kLinearUpdate, device);
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(-1) == features, "ringcomm: ", kLinearUpdate,
                    " needs ", name, " of shape (..., ", features, ") to fit the weight, got ",
                    tensor.sizes());
  const int64_t num_tokens = c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
  return tensor.detach().reshape({num_tokens, features});
}

}  // namespace

std::pair<at::Tensor, at::Tensor> tokens_of(const at::Tensor& weight, const at::Tensor& x,
                                            const at::Tensor& grad_out) {
  std::pair rows(flat_tokens(x, weight.size(1), "x", weight.device()),
                 flat_tokens(grad_out, weight.size(0), "grad_out", weight.device()));
  check_same_dtype(x, grad_out, kLinearUpdate);
  TORCH_CHECK_VALUE(rows.first.size(0) == rows.second.size(0), "ringcomm: ", kLinearUpdate,
                    " needs x and grad_out with the same number of tokens, got shapes ", x.sizes(),
                    " and ", grad_out.sizes());
  return rows;
}

void check_embedding(const at::Tensor& weight, const at::Tensor& indices,
                     const at::Tensor& grad_out, int64_t padding_idx) {
  TORCH_CHECK_VALUE(padding_idx >= -1 && padding_idx < std::max<int64_t>(1, weight.size(0)),
                    "ringcomm: ", kEmbeddingUpdate, ": padding_idx must be one of the weight's ",
                    weight.size(0), " rows, or -1 for none, got ", padding_idx);
  check_float(grad_out, "grad_out", kEmbeddingUpdate, weight.device());
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  check_shape(grad_out, sizes, "grad_out", kEmbeddingUpdate);
  check_dense(indices, "indices", kEmbeddingUpdate, weight.device());
  TORCH_CHECK_TYPE(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt,
                   "ringcomm: ", kEmbeddingUpdate, " needs indices in int64 or int32, got ",
                   indices.scalar_type());
}

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "sgd_update_(Tensor(a!) weight, Tensor grad, float lr, float weight_decay, float scale, "
      "int rounding_seed=-1, *, Tensor(b!)? low=None, float? clip_value=None, int first_elem=0) "
      "-> ()");
  m.def(
      "linear_sgd_update_(Tensor(a!) weight, Tensor x, Tensor grad_out, float lr, "
      "float weight_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None) -> ()");
  m.def(
      "embedding_sgd_update_(Tensor(a!) weight, Tensor indices, Tensor grad_out, float lr, "
      "float weight_decay, float scale, int rounding_seed=-1, *, Tensor(b!)? low=None, "
      "float? clip_value=None, int padding_idx=-1) -> ()");
  m.def(
      "square_sums(Tensor grad, float scale, *, float? clip_value=None) "
      "-> (Tensor rows, Tensor cols)");
  m.def(
      "adalomo_moments_(Tensor(a!)? row, Tensor(b!) col, Tensor row_sums, Tensor col_sums, "
      "float share, float eps) -> (Tensor col_factor, Tensor row_mean)");
  m.def(
      "adalomo_squares(Tensor weight, Tensor grad, Tensor? row, Tensor col_factor, "
      "Tensor row_mean, float scale, *, Tensor? low=None, float? clip_value=None) -> Tensor");
  m.def(
      "adalomo_update_(Tensor(a!) weight, Tensor grad, Tensor? row, Tensor col_factor, "
      "Tensor row_mean, Tensor squares, int num_elems, float lr, float weight_decay, "
      "float least_rms, float clip_threshold, float scale, int rounding_seed=-1, *, "
      "Tensor(b!)? low=None, float? clip_value=None, int first_elem=0) -> ()");
  m.def(
      "optimizer_update_(Tensor(a!) param, Tensor grad, Tensor(b!)[] states, Tensor(c!)? master, "
      "*, str optimizer, float[] numbers, bool nesterov, int step, float grad_scale) -> ()");
}

TORCH_LIBRARY_IMPL(ringcomm, Autograd, m) {
  for (const char* const name : {"sgd_update_", "linear_sgd_update_", "embedding_sgd_update_",
                                 "adalomo_update_", "optimizer_update_"})
    m.impl(name, refuse_grad());
}

TORCH_LIBRARY_IMPL(ringcomm, CPU, m) {
  m.impl("sgd_update_", sgd_update_);
  m.impl("linear_sgd_update_", linear_sgd_update_);
  m.impl("embedding_sgd_update_", embedding_sgd_update_);
  m.impl(kOptimizerUpdate, optimizer_update_);
}

}  // namespace ringcomm
