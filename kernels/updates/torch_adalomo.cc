#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/updates/torch_arguments.h"

// AdaLomo's operators of torch_weight_update.cc.

namespace ringcomm {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// Part of a matrix. What tiles there are depends on its shape alone, and sums over tiles are added
/// in their order: the number of threads changes no bit.
struct Tile {
  int64_t row_begin, row_end;
  int64_t col_begin, col_end;
};

class Tiles {
 public:
  static constexpr int64_t kWidth = 4096;
  static constexpr int64_t kMaxBands = 32;  // a sum for each column and band is kept

  Tiles(int64_t num_rows, int64_t num_cols)
      : num_rows_(num_rows),
        num_cols_(num_cols),
        num_panels_((num_cols + kWidth - 1) / kWidth),
        num_bands_(std::clamp<int64_t>(num_rows * std::min(num_cols, kWidth) / kGrainElems, 1,
                                       std::min(kMaxBands, std::max<int64_t>(1, num_rows)))) {}

  int64_t num_panels() const { return num_panels_; }
  int64_t num_bands() const { return num_bands_; }

  /// Calls body(band, panel, tile) for every tile, on all of torch's threads.
  template <class Body>
  void for_each(const Body& body) const {
    at::parallel_for(0, num_bands_ * num_panels_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t band = i / num_panels_, panel = i % num_panels_;
        body(band, panel,
             Tile{band * num_rows_ / num_bands_, (band + 1) * num_rows_ / num_bands_,
                  panel * kWidth, std::min(num_cols_, (panel + 1) * kWidth)});
      }
    });
  }

 private:
  int64_t num_rows_, num_cols_, num_panels_, num_bands_;
};

// Rows whose squares are added up in fp32 before they go into a sum in double.
constexpr int64_t kFp32Rows = 8;

// The squares of a tile; row_sums[i] is the matrix's row i's, col_sums[j] its column j's.
void add_tile(const Tile& tile, const at::Tensor& grad, const WeightStep& step, const GradOps& ops,
              double* row_sums, double* col_sums) {
  const int64_t width = tile.col_end - tile.col_begin;
  std::array<float, Tiles::kWidth> fp32_sums;
  for (int64_t first = tile.row_begin; first < tile.row_end; first += kFp32Rows) {
    std::fill_n(fp32_sums.begin(), width, 0.0F);
    for (int64_t row = first; row < std::min(first + kFp32Rows, tile.row_end); ++row) {
      const int64_t offset = (row * grad.size(1) + tile.col_begin) * grad.element_size();
      row_sums[row] =
          ops.add_squares(step, static_cast<const char*>(grad.const_data_ptr()) + offset,
                          static_cast<std::size_t>(width), fp32_sums.data());
    }
    for (int64_t i = 0; i < width; ++i) col_sums[tile.col_begin + i] += fp32_sums[i];
  }
}

std::tuple<at::Tensor, at::Tensor> square_sums(const at::Tensor& grad, double scale,
                                               std::optional<double> clip_value) {
  constexpr const char* kOp = "square_sums";
  check_float(grad, "grad", kOp);
  TORCH_CHECK_VALUE(grad.dim() == 2, "ringcomm: ", kOp, " needs a matrix, got shape ",
                    grad.sizes());
  const WeightStep step = weight_step_of({.scale = scale, .clip_value = clip_value}, kOp);
  const at::Tensor matrix = grad.detach().contiguous();
  const int64_t num_rows = grad.size(0), num_cols = grad.size(1);
  const GradOps& ops = grad_ops_of(grad);
  const Tiles tiles(num_rows, num_cols);
  // In double, for each panel one of every row, for each band one of every column.
  const at::Tensor rows = at::zeros({tiles.num_panels(), num_rows}, at::kDouble);
  const at::Tensor cols = at::zeros({tiles.num_bands(), num_cols}, at::kDouble);
  tiles.for_each([&](int64_t band, int64_t panel, const Tile& tile) {
    add_tile(tile, matrix, step, ops, rows.data_ptr<double>() + panel * num_rows,
             cols.data_ptr<double>() + band * num_cols);
  });
  return {rows.sum(0, true).to(at::kFloat), cols.sum(0, true).to(at::kFloat)};
}

std::tuple<at::Tensor, at::Tensor> adalomo_moments_(const OptionalTensor& row,
                                                    const at::Tensor& col,
                                                    const at::Tensor& row_sums,
                                                    const at::Tensor& col_sums, double share,
                                                    double eps) {
  check_moments(row, col, row_sums, col_sums, "adalomo_moments_");
  const auto move = [&](const at::Tensor& moment, const at::Tensor& sums, int64_t num_each) {
    const at::Tensor means = sums.sum(0, false, at::kDouble).div_(num_each);
    moment.lerp_(means.to(at::kFloat).add_(eps), share);
  };
  move(col, col_sums, row.has_value() ? row->size(0) : 1);
  if (!row.has_value()) return {col.rsqrt(), at::empty({0}, at::kDouble)};
  move(*row, row_sums, col.size(0));
  return {col.rsqrt(), row->mean(0, true, at::kDouble)};
}

/// A weight, its gradient, and the moments and factors that make the update's direction, checked.
class FactoredUpdate {
 public:
  FactoredUpdate(const WeightArray& array, const at::Tensor& grad, const OptionalTensor& row,
                 const at::Tensor& col_factor, const at::Tensor& row_mean,
                 const OptionalTensor& squares, const char* op)
      : array_(array), num_cols_(array.weight().size(1)) {
    check_grad(grad, array.weight(), op);
    check_factors(array.weight(), row, col_factor, row_mean, squares, op);
    grad_ = grad.detach().contiguous();
    col_factor_ = col_factor;
    row_factors_.resize(array.weight().size(0), 1.0F);
    if (!row.has_value()) return;
    const auto mean = static_cast<float>(row_mean.sum().item<double>());
    for (std::size_t i = 0; i < row_factors_.size(); ++i)
      row_factors_[i] = 1 / std::sqrt(row->const_data_ptr<float>()[i] / mean);
  }

  const WeightOps& ops() const { return array_.ops(float_dtype_of(grad_)); }
  Tiles tiles() const { return {array_.weight().size(0), num_cols_}; }

  /// Calls body(run) for the rows of a tile.
  template <class Body>
  void for_rows(const Tile& tile, const Body& body) const {
    const auto* grads = static_cast<const char*>(grad_.const_data_ptr());
    for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
      const int64_t begin = row * num_cols_ + tile.col_begin;
      WeightRun run = array_.run(begin, tile.col_end - tile.col_begin);
      run.grad = grads + begin * grad_.element_size();
      run.row_factor = row_factors_[row];
      run.col_factor = col_factor_.const_data_ptr<float>() + tile.col_begin;
      body(run);
    }
  }

 private:
  const WeightArray& array_;
  int64_t num_cols_;
  at::Tensor grad_, col_factor_;
  std::vector<float> row_factors_;
};

at::Tensor adalomo_squares(const at::Tensor& weight, const at::Tensor& grad,
                           const OptionalTensor& row, const at::Tensor& col_factor,
                           const at::Tensor& row_mean, double scale, const OptionalTensor& low,
                           std::optional<double> clip_value) {
  constexpr const char* kOp = "adalomo_squares";
  const WeightArray array(weight, low, -1, true, kOp);
  const WeightStep step = weight_step_of({.scale = scale, .clip_value = clip_value}, kOp);
  const FactoredUpdate update(array, grad, row, col_factor, row_mean, std::nullopt, kOp);
  const WeightOps& ops = update.ops();
  const Tiles tiles = update.tiles();
  std::vector<RunSquares> partial(tiles.num_bands() * tiles.num_panels());
  tiles.for_each([&](int64_t band, int64_t panel, const Tile& tile) {
    RunSquares sum;
    update.for_rows(tile, [&](const WeightRun& run) {
      const RunSquares squares = ops.squares(step, run);
      sum.update += squares.update;
      sum.weight += squares.weight;
    });
    partial[band * tiles.num_panels() + panel] = sum;
  });
  RunSquares sum;
  for (const RunSquares& part : partial) {
    sum.update += part.update;
    sum.weight += part.weight;
  }
  at::Tensor result = at::empty({2, 1}, at::kDouble);
  result.data_ptr<double>()[0] = sum.update;
  result.data_ptr<double>()[1] = sum.weight;
  return result;
}

void adalomo_update_(const at::Tensor& weight, const at::Tensor& grad, const OptionalTensor& row,
                     const at::Tensor& col_factor, const at::Tensor& row_mean,
                     const at::Tensor& squares, int64_t num_elems, double lr, double weight_decay,
                     double least_rms, double clip_threshold, double scale, int64_t rounding_seed,
                     const OptionalTensor& low, std::optional<double> clip_value,
                     int64_t first_elem) {
  constexpr const char* kOp = "adalomo_update_";
  const WeightArray array(weight, low, rounding_seed, true, kOp);
  WeightStep step = weight_step_of({lr, weight_decay, scale, clip_value, rounding_seed}, kOp);
  check_first_elem(first_elem, kOp);
  const FactoredUpdate update(array, grad, row, col_factor, row_mean, squares, kOp);
  array.check_writable({grad, col_factor, row_mean, squares});
  // In fp32, and NaN stays: as adalomo_kernel of weight_update.py.
  const auto at_least = [](float value, double least) {
    return value < static_cast<float>(least) ? static_cast<float>(least) : value;
  };
  const at::Tensor sums = squares.sum(1);
  const auto rms = [&](int idx) {
    return std::sqrt(
        static_cast<float>(sums.const_data_ptr<double>()[idx] / static_cast<double>(num_elems)));
  };
  const float size = static_cast<float>(lr) * at_least(rms(1), least_rms);
  step.lr_minus = -(size / at_least(rms(0) / static_cast<float>(clip_threshold), 1));
  step.decay = std::fma(-size, static_cast<float>(weight_decay), 1.0F);
  const WeightOps& ops = update.ops();
  update.tiles().for_each([&](int64_t, int64_t, const Tile& tile) {
    update.for_rows(tile, [&](WeightRun run) {
      run.first_elem += static_cast<std::uint64_t>(first_elem);
      ops.update(step, run);
    });
  });
  array.mark_written();
}

void check_plain(const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
                 const char* name, const char* op, at::Device device) {
  check_dtype(tensor, dtype, name, op, device);
  check_shape(tensor, sizes, name, op);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "ringcomm: ", op, " needs ", name, " contiguous");
}

}  // namespace

void check_moments(const OptionalTensor& row, const at::Tensor& col, const at::Tensor& row_sums,
                   const at::Tensor& col_sums, const char* op) {
  const auto check = [&](const at::Tensor& moment, const char* name, const at::Tensor& sums,
                         const char* name_of_sums) {
    const at::Device device = col_sums.device();
    check_plain(sums, at::kFloat, {sums.size(0), sums.size(-1)}, name_of_sums, op, device);
    check_plain(moment, at::kFloat, {sums.size(-1)}, name, op, device);
  };
  if (row.has_value()) check(*row, "row", row_sums, "row_sums");
  check(col, "col", col_sums, "col_sums");
}

void check_factors(const at::Tensor& weight, const OptionalTensor& row,
                   const at::Tensor& col_factor, const at::Tensor& row_mean,
                   const OptionalTensor& squares, const char* op) {
  const auto check = [&](const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes,
                         const char* name) {
    check_plain(tensor, dtype, sizes, name, op, weight.device());
  };
  if (row.has_value()) check(*row, at::kFloat, {weight.size(0)}, "row");
  check(col_factor, at::kFloat, {weight.size(1)}, "col_factor");
  check(row_mean, at::kDouble, {row_mean.numel()}, "row_mean");
  if (squares.has_value()) check(*squares, at::kDouble, {2, squares->size(-1)}, "squares");
}

TORCH_LIBRARY_IMPL(ringcomm, CPU, m) {
  m.impl("square_sums", square_sums);
  m.impl("adalomo_moments_", adalomo_moments_);
  m.impl("adalomo_squares", adalomo_squares);
  m.impl("adalomo_update_", adalomo_update_);
}

}  // namespace ringcomm
