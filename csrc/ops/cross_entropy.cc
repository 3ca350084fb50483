#include "ops/cross_entropy.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "bindings/tensors.h"

namespace ringcomm {
namespace {

// The weights of all classes, contiguous.
at::Tensor checked_weight(const at::Tensor& weight, std::int64_t vocab_size) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat,
                   "ringcomm: class weights must be float32, got ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == vocab_size,
                    "ringcomm: class_weight needs one weight for each of the ", vocab_size,
                    " classes, got shape ", weight.sizes());
  return weight.contiguous();
}

}  // namespace

LogitRows::LogitRows(const at::Tensor& logits, const at::Tensor& target,
                     const std::optional<at::Tensor>& weight, const VocabShard& shard)
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
  ops_ = host::find_softmax_ops(reduced_dtype(logits, "cross_entropy"));
  TORCH_CHECK_TYPE(ops_ != nullptr, "ringcomm: logits must be float32, float16 or bfloat16, got ",
                   logits.scalar_type());
  target_ = target.contiguous();
  targets_ = target_.const_data_ptr<std::int64_t>();
  num_classes_ = shard.vocab_size < 0
                     ? width()
                     : std::clamp<std::int64_t>(shard.vocab_size - shard.vocab_start, 0, width());
  if (!weight.has_value()) return;
  weight_ = checked_weight(*weight, shard.vocab_size);
  weights_ = weight_.const_data_ptr<float>();
}

LogitRow LogitRows::row(std::int64_t idx) const {
  const std::int64_t target = targets_[idx] - shard_.vocab_start;
  const std::int64_t stride_bytes = logits_.stride(0) * logits_.element_size();
  return {.logits = static_cast<const char*>(logits_.const_data_ptr()) + idx * stride_bytes,
          .num_elems = static_cast<std::size_t>(num_classes_),
          .weight = weights_ != nullptr ? weights_ + shard_.vocab_start : nullptr,
          .target_idx = target >= 0 && target < num_classes_ ? target : -1,
          .logit_scale = static_cast<float>(shard_.logit_scale),
          .softcap = static_cast<float>(shard_.softcap)};
}

TokenLoss::TokenLoss(const at::Tensor& target, const std::optional<at::Tensor>& weight,
                     const LossTerms& terms, std::int64_t ignore_index, std::int64_t vocab_size)
    : target_(target.contiguous()), ignore_index_(ignore_index), terms_(terms) {
  targets_ = target_.const_data_ptr<std::int64_t>();
  smooth_ = terms.label_smoothing / static_cast<double>(vocab_size);
  weight_sum_ = static_cast<double>(vocab_size);
  if (weight.has_value()) {
    weight_ = checked_weight(*weight, vocab_size);
    weights_ = weight_.const_data_ptr<float>();
    weight_sum_ = 0;
    for (std::int64_t i = 0; i < vocab_size; ++i) weight_sum_ += weights_[i];
  }
  for (std::int64_t i = 0; i < target_.size(0); ++i)
    TORCH_CHECK_INDEX(is_ignored(i) || (targets_[i] >= 0 && targets_[i] < vocab_size),
                      "ringcomm: target ", i, " is ", targets_[i], ", and there are ", vocab_size,
                      " classes; ignore_index is ", ignore_index);
}

TokenLoss::Values TokenLoss::values(std::int64_t idx, const SoftmaxStats& stats) const {
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

LogitGrad TokenLoss::gradient(std::int64_t idx, const SoftmaxStats& stats, double scale) const {
  const double sum = stats.sum, lse = stats.max + std::log(sum);
  const double target = (1 - terms_.label_smoothing) * weight_of_target(idx);
  const double prob = target + smooth_ * weight_sum_ + 2 * terms_.z_loss * lse;
  return {.max = stats.max,
          .prob = static_cast<float>(prob * scale / sum),
          .smooth = static_cast<float>(smooth_ * scale),
          .target = static_cast<float>(target * scale)};
}

double TokenLoss::weight_of_targets() const {
  double sum = 0;
  for (std::int64_t i = 0; i < target_.size(0); ++i)
    if (!is_ignored(i)) sum += weight_of_target(i);
  return sum;
}

}  // namespace ringcomm
