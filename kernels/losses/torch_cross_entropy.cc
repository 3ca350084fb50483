#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>

#include "kernels/common/tables.h"
#include "kernels/losses/torch_softmax_stats.h"
#include "kernels/torch_checks.h"

// torch.ops.ringcomm.*: the steps of cross_entropy, but for merge_softmax_stats. Fakes, autograd
// and the wrapper are in ringcomm/ops/losses/cross_entropy.py, the formulas in
// docs/design/cross_entropy.md.

namespace ringcomm {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// The terms of a loss besides the logit of its target.
struct LossTerms {
  double label_smoothing = 0;
  double z_loss = 0;
};

// ---- rows of logits, and the loss of a token

// The weights of all classes, contiguous.
at::Tensor checked_weight(const at::Tensor& weight, std::int64_t vocab_size) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat,
                   "ringcomm: class weights must be float32, got ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == vocab_size,
                    "ringcomm: class_weight needs one weight for each of the ", vocab_size,
                    " classes, got shape ", weight.sizes());
  return weight.contiguous();
}

/// The rows of logits and their targets, checked. Throws ValueError or TypeError.
class LogitRows {
 public:
  LogitRows(const at::Tensor& logits, const at::Tensor& target, const OptionalTensor& weight,
            const VocabShard& shard)
      : logits_(logits), shard_(shard) {
    TORCH_CHECK_VALUE(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1),
                      "ringcomm: logits must be a matrix with contiguous rows, got shape ",
                      logits.sizes(), " with strides ", logits.strides());
    TORCH_CHECK_VALUE(target.dim() == 1 && target.size(0) == logits.size(0),
                      "ringcomm: targets must be one for each row of logits, got shape ",
                      target.sizes(), " for logits of shape ", logits.sizes());
    TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, "ringcomm: targets must be int64, got ",
                     target.scalar_type());
    TORCH_CHECK_VALUE(shard.vocab_start >= 0, "ringcomm: vocab_start must be 0 or more, got ",
                      shard.vocab_start);
    check_float_dtype(logits, "logits", "cross_entropy");
    ops_ = &cpu::kernels().softmax[cpu::float_dtype_idx(float_dtype_of(logits))];
    target_ = target.contiguous();
    targets_ = target_.const_data_ptr<std::int64_t>();
    num_classes_ = shard.vocab_size < 0
                       ? width()
                       : std::clamp<std::int64_t>(shard.vocab_size - shard.vocab_start, 0, width());
    if (!weight.has_value()) return;
    weight_ = checked_weight(*weight, shard.vocab_size);
    weights_ = weight_.const_data_ptr<float>() + shard.vocab_start;
  }

  std::int64_t size() const { return logits_.size(0); }
  std::int64_t width() const { return logits_.size(1); }
  /// The columns that are classes; the others are padding.
  std::int64_t num_classes() const { return num_classes_; }
  bool is_ignored(std::int64_t idx) const { return targets_[idx] == shard_.ignore_index; }

  LogitRow row(std::int64_t idx) const {
    const std::int64_t target = targets_[idx] - shard_.vocab_start;
    const std::int64_t stride_bytes = logits_.stride(0) * logits_.element_size();
    return {.logits = static_cast<const char*>(logits_.const_data_ptr()) + idx * stride_bytes,
            .num_elems = static_cast<std::size_t>(num_classes_),
            .weight = weights_,
            .target_idx = target >= 0 && target < num_classes_ ? target : -1,
            .logit_scale = static_cast<float>(shard_.logit_scale),
            .softcap = static_cast<float>(shard_.softcap)};
  }

  SoftmaxStats stats(std::int64_t idx, bool wants_weighted, bool wants_more) const {
    if (is_ignored(idx)) return kNoLogits;
    LogitRow logits = row(idx);
    logits.wants_weighted = wants_weighted;
    logits.wants_more = wants_more;
    SoftmaxStats stats = ops_->stats(logits);
    const bool has_index = wants_more && num_classes_ > 0;
    stats.argmax =
        has_index ? stats.argmax + static_cast<std::int32_t>(shard_.vocab_start) : kNoIndex;
    return stats;
  }

  /// Writes the gradient of a row's logits to `to`.
  void write_gradient(std::int64_t idx, const LogitGrad& grad, void* to) const {
    ops_->grad(row(idx), grad, to);
  }

  /// Calls body(row index) for every row, on all of torch's threads.
  template <class Body>
  void for_each(const Body& body) const {
    const std::int64_t grain =
        std::max<std::int64_t>(1, kGrainElems / std::max<std::int64_t>(1, width()));
    at::parallel_for(0, size(), grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) body(i);
    });
  }

 private:
  at::Tensor logits_, target_, weight_;
  VocabShard shard_;
  const SoftmaxOps* ops_ = nullptr;
  const std::int64_t* targets_ = nullptr;
  const float* weights_ = nullptr;  // of this rank's classes
  std::int64_t num_classes_ = 0;
};

/// Computes a token's loss and gradient from the stats of its whole row, in double.
class TokenLoss {
 public:
  /// `target` as in LogitRows; `vocab_size` known by now. Throws IndexError naming the first target
  /// that is no class.
  TokenLoss(const at::Tensor& target, const OptionalTensor& weight, const LossTerms& terms,
            std::int64_t ignore_index, std::int64_t vocab_size)
      : target_(target.contiguous()),
        targets_(target_.const_data_ptr<std::int64_t>()),
        ignore_index_(ignore_index),
        terms_(terms),
        smooth_(terms.label_smoothing / static_cast<double>(vocab_size)),
        weight_sum_(static_cast<double>(vocab_size)) {
    if (weight.has_value()) {
      weight_ = checked_weight(*weight, vocab_size);
      weights_ = weight_.const_data_ptr<float>();
      weight_sum_ = std::accumulate(weights_, weights_ + vocab_size, 0.0);
    }
    for (std::int64_t i = 0; i < target_.size(0); ++i)
      TORCH_CHECK_INDEX(is_ignored(i) || (targets_[i] >= 0 && targets_[i] < vocab_size),
                        "ringcomm: target[", i, "] = ", targets_[i], " is out of range 0 to ",
                        vocab_size - 1, " (ignore_index is ", ignore_index, ")");
  }

  struct Values {
    double loss, lse, entropy, accuracy;
  };
  /// All 0 where the token is ignored.
  Values values(std::int64_t idx, const SoftmaxStats& stats) const {
    if (is_ignored(idx)) return {};
    const double max = stats.max, log_sum = std::log(static_cast<double>(stats.sum));
    const double lse = max + log_sum;
    const double likelihood = log_sum - (stats.target - max);
    const double loss = (1 - terms_.label_smoothing) * weight_of_target(idx) * likelihood +
                        (smooth_ != 0 ? smooth_ * (weight_sum_ * lse - stats.weighted) : 0.0) +
                        terms_.z_loss * lse * lse;
    return {.loss = loss,
            .lse = lse,
            .entropy = log_sum - stats.entropy / static_cast<double>(stats.sum),
            .accuracy = stats.argmax == targets_[idx] ? 1.0 : 0.0};
  }

  /// `scale` multiplies the loss. Not of ignored tokens.
  LogitGrad gradient(std::int64_t idx, const SoftmaxStats& stats, double scale) const {
    const double sum = stats.sum, lse = stats.max + std::log(sum);
    const double target = (1 - terms_.label_smoothing) * weight_of_target(idx);
    const double prob = target + smooth_ * weight_sum_ + 2 * terms_.z_loss * lse;
    return {.max = stats.max,
            .prob = static_cast<float>(prob * scale / sum),
            .smooth = static_cast<float>(smooth_ * scale),
            .target = static_cast<float>(target * scale)};
  }

  /// The sum of the targets' weights: their number where there are no weights.
  double weight_of_targets() const {
    double sum = 0;
    for (std::int64_t i = 0; i < target_.size(0); ++i)
      if (!is_ignored(i)) sum += weight_of_target(i);
    return sum;
  }

 private:
  bool is_ignored(std::int64_t idx) const { return targets_[idx] == ignore_index_; }
  double weight_of_target(std::int64_t idx) const {
    return weights_ != nullptr ? weights_[targets_[idx]] : 1.0;
  }

  at::Tensor target_, weight_;
  const std::int64_t* targets_;
  const float* weights_ = nullptr;
  std::int64_t ignore_index_;
  LossTerms terms_;
  double smooth_;      // label_smoothing / vocab_size
  double weight_sum_;  // of all classes
};

at::Tensor softmax_stats(const at::Tensor& logits, const at::Tensor& target,
                         const OptionalTensor& weight, int64_t vocab_start, int64_t vocab_size,
                         int64_t ignore_index, double logit_scale, double softcap,
                         bool wants_weighted, bool wants_more) {
  const VocabShard shard = {vocab_start, vocab_size, ignore_index, logit_scale, softcap};
  const LogitRows rows(logits, target, weight, shard);
  const at::Tensor stats = new_softmax_stats(rows.size());
  rows.for_each(
      [&](std::int64_t i) { put_stats(stats, i, rows.stats(i, wants_weighted, wants_more)); });
  put_stats(stats, rows.size(), shard_entry(shard, rows.num_classes(), wants_weighted, wants_more));
  return stats;
}

double denominator_of(const TokenLoss& loss, const OptionalTensor& num_items,
                      const std::string& reduction) {
  if (reduction != "mean") return 1;
  return num_items.has_value() ? num_items->item().toDouble() : loss.weight_of_targets();
}

// The tokens' values, and the reduction of their losses.
class Results {
 public:
  Results(std::int64_t num_tokens, std::string reduction)
      : per_token_(at::empty({4, num_tokens}, at::kFloat)), reduction_(std::move(reduction)) {
    TORCH_CHECK_VALUE(reduction_ == "mean" || reduction_ == "sum" || reduction_ == "none",
                      "ringcomm: reduction must be mean, sum or none, got '", reduction_, "'");
  }

  void put(std::int64_t idx, const TokenLoss::Values& values) {
    auto* to = static_cast<float*>(per_token_.data_ptr()) + idx;
    for (const double value : {values.loss, values.lse, values.entropy, values.accuracy}) {
      *to = static_cast<float>(value);
      to += per_token_.size(1);
    }
  }

  const std::string& reduction() const { return reduction_; }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> finish(double denominator) {
    const at::Tensor loss = reduction_ == "none"
                                ? per_token_.select(0, 0).clone()
                                : at::scalar_tensor(sum_of_losses() / denominator, at::kFloat);
    return {loss, per_token_, at::scalar_tensor(denominator, at::kDouble)};
  }

 private:
  // In order: torch's sum over many tokens depends on the number of threads.
  double sum_of_losses() const {
    const auto* losses = static_cast<const float*>(per_token_.const_data_ptr());
    return std::accumulate(losses, losses + per_token_.size(1), 0.0);
  }

  at::Tensor per_token_;
  std::string reduction_;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> cross_entropy_loss(
    const at::Tensor& stats, const at::Tensor& target, const OptionalTensor& weight,
    const OptionalTensor& num_items, int64_t vocab_size, int64_t ignore_index,
    double label_smoothing, double z_loss, std::string reduction) {
  check_stats(stats, target.numel());
  Results results(target.numel(), std::move(reduction));
  const TokenLoss loss(target, weight, {label_smoothing, z_loss}, ignore_index,
                       vocab_size_of(stats, vocab_size));
  for (std::int64_t i = 0; i < target.numel(); ++i)
    results.put(i, loss.values(i, get_stats(stats, i)));
  return results.finish(denominator_of(loss, num_items, results.reduction()));
}

// Filling a large new tensor spends most of its time in page faults of 4 KiB each, so this asks for
// huge pages. It is only a hint.
void ask_for_huge_pages(const at::Tensor& tensor) {
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void write_zeros(const at::Tensor& to, std::int64_t row, std::int64_t begin) {
  const std::int64_t bytes = to.element_size();
  std::memset(static_cast<char*>(to.data_ptr()) + (row * to.stride(0) + begin) * bytes, 0,
              (to.size(1) - begin) * bytes);
}

void write_gradient(const LogitRows& rows, const TokenLoss& loss, std::int64_t idx,
                    const SoftmaxStats& stats, double scale, const at::Tensor& to) {
  if (rows.is_ignored(idx)) return write_zeros(to, idx, 0);
  char* row = static_cast<char*>(to.data_ptr()) + idx * to.stride(0) * to.element_size();
  rows.write_gradient(idx, loss.gradient(idx, stats, scale), row);
  write_zeros(to, idx, rows.num_classes());
}

// Writes the gradient to `to`, which may be the logits.
void differentiate(const at::Tensor& grad_loss, const at::Tensor& logits, const at::Tensor& target,
                   const OptionalTensor& weight, const at::Tensor& stats,
                   const at::Tensor& denominator, const VocabShard& shard, const LossTerms& terms,
                   const at::Tensor& to) {
  check_stats(stats, target.numel());
  const LogitRows rows(logits, target, weight, shard);
  const TokenLoss loss(target, weight, terms, shard.ignore_index,
                       vocab_size_of(stats, shard.vocab_size));
  const at::Tensor upstream = grad_loss.to(at::kFloat).contiguous();
  TORCH_CHECK_VALUE(upstream.dim() == 0 || upstream.numel() == rows.size(),
                    "ringcomm: the loss's gradient must be one number, or one for each of ",
                    rows.size(), " tokens; got shape ", upstream.sizes());
  const auto* factors = static_cast<const float*>(upstream.const_data_ptr());
  const std::int64_t stride = upstream.dim() == 0 ? 0 : 1;
  const double divisor = denominator.item().toDouble();
  rows.for_each([&](std::int64_t i) {
    write_gradient(rows, loss, i, get_stats(stats, i), factors[i * stride] / divisor, to);
  });
}

at::Tensor cross_entropy_grad(const at::Tensor& grad_loss, const at::Tensor& logits,
                              const at::Tensor& target, const OptionalTensor& weight,
                              const at::Tensor& stats, const at::Tensor& denominator,
                              int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                              double logit_scale, double softcap, double label_smoothing,
                              double z_loss) {
  const at::Tensor grad = at::empty(logits.sizes(), logits.options());
  ask_for_huge_pages(grad);
  differentiate(grad_loss, logits, target, weight, stats, denominator,
                {vocab_start, vocab_size, ignore_index, logit_scale, softcap},
                {label_smoothing, z_loss}, grad);
  return grad;
}

void cross_entropy_grad_(const at::Tensor& grad_loss, const at::Tensor& logits,
                         const at::Tensor& target, const OptionalTensor& weight,
                         const at::Tensor& stats, const at::Tensor& denominator,
                         int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                         double logit_scale, double softcap, double label_smoothing,
                         double z_loss) {
  differentiate(grad_loss, logits, target, weight, stats, denominator,
                {vocab_start, vocab_size, ignore_index, logit_scale, softcap},
                {label_smoothing, z_loss}, logits);
  mark_written(logits);
}

// Row by row, so that the gradient finds the logits in the cache.
std::tuple<at::Tensor, at::Tensor, at::Tensor> cross_entropy_and_grad_(
    const at::Tensor& logits, const at::Tensor& target, const OptionalTensor& weight,
    const OptionalTensor& num_items, int64_t vocab_size, int64_t ignore_index, double logit_scale,
    double softcap, double label_smoothing, double z_loss, std::string reduction, bool wants_more) {
  const VocabShard shard = {0, vocab_size, ignore_index, logit_scale, softcap};
  const LogitRows rows(logits, target, weight, shard);
  TORCH_CHECK_VALUE(rows.num_classes() == vocab_size, "ringcomm: the logits have ", rows.width(),
                    " columns for a vocabulary of ", vocab_size);
  Results results(rows.size(), std::move(reduction));
  const TokenLoss loss(target, weight, {label_smoothing, z_loss}, ignore_index, vocab_size);
  const double denominator = denominator_of(loss, num_items, results.reduction());
  rows.for_each([&](std::int64_t i) {
    const SoftmaxStats stats = rows.stats(i, label_smoothing != 0, wants_more);
    results.put(i, loss.values(i, stats));
    write_gradient(rows, loss, i, stats, 1 / denominator, logits);
  });
  mark_written(logits);
  return results.finish(denominator);
}

void scale_(const at::Tensor& tensor, const at::Tensor& factor) {
  mark_written(tensor);  // also if the factor is 1, so that the next backward pass raises
  if (factor.item().toDouble() == 1) return;
  // Not by a number, which mul_() rounds to the tensor's dtype first.
  tensor.mul_(factor.to(at::kFloat));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringcomm, m) {
  m.def(
      "softmax_stats(Tensor logits, Tensor target, Tensor? weight, int vocab_start, "
      "int vocab_size, int ignore_index, float logit_scale, float softcap, bool wants_weighted, "
      "bool wants_more) -> Tensor");
  m.def(
      "cross_entropy_loss(Tensor stats, Tensor target, Tensor? weight, Tensor? num_items, "
      "int vocab_size, int ignore_index, float label_smoothing, float z_loss, str reduction) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_grad(Tensor grad_loss, Tensor logits, Tensor target, Tensor? weight, "
      "Tensor stats, Tensor denominator, int vocab_start, int vocab_size, int ignore_index, "
      "float logit_scale, float softcap, float label_smoothing, float z_loss) -> Tensor");
  m.def(
      "cross_entropy_grad_(Tensor grad_loss, Tensor(a!) logits, Tensor target, Tensor? weight, "
      "Tensor stats, Tensor denominator, int vocab_start, int vocab_size, int ignore_index, "
      "float logit_scale, float softcap, float label_smoothing, float z_loss) -> ()");
  m.def(
      "cross_entropy_and_grad_(Tensor(a!) logits, Tensor target, Tensor? weight, "
      "Tensor? num_items, int vocab_size, int ignore_index, float logit_scale, float softcap, "
      "float label_smoothing, float z_loss, str reduction, bool wants_more) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("scale_(Tensor(a!) tensor, Tensor factor) -> ()");
}

TORCH_LIBRARY_IMPL(ringcomm, CPU, m) {
  m.impl("softmax_stats", softmax_stats);
  m.impl("cross_entropy_loss", cross_entropy_loss);
  m.impl("cross_entropy_grad", cross_entropy_grad);
  m.impl("cross_entropy_grad_", cross_entropy_grad_);
  m.impl("cross_entropy_and_grad_", cross_entropy_and_grad_);
  m.impl("scale_", scale_);
}

}  // namespace ringcomm
