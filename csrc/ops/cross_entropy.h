#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/softmax.h"

namespace ringcomm {

// The steps of cross_entropy on tensors of the CPU; as torch operators in ops/cross_entropy_ops.cc.

/// The transformation of logits, and this rank's shard of the classes.
struct VocabShard {
  std::int64_t vocab_start = 0;
  std::int64_t vocab_size =
      -1;  ///< of all ranks, without padding; -1: not known before the exchange
  std::int64_t ignore_index = -100;
  double logit_scale = 1;
  double softcap = 0;  ///< 0: none
};

/// The terms of a loss besides the logit of its target.
struct LossTerms {
  double label_smoothing = 0;
  double z_loss = 0;
};

/// The rows of logits and their targets, checked. Throws ValueError or TypeError.
class LogitRows {
 public:
  LogitRows(const at::Tensor& logits, const at::Tensor& target,
            const std::optional<at::Tensor>& weight, const VocabShard& shard);

  std::int64_t size() const { return logits_.size(0); }
  std::int64_t width() const { return logits_.size(1); }
  /// The columns that are classes; the others are padding.
  std::int64_t num_classes() const { return num_classes_; }
  const SoftmaxOps& ops() const { return *ops_; }

  LogitRow row(std::int64_t idx) const;
  bool is_ignored(std::int64_t idx) const { return targets_[idx] == shard_.ignore_index; }

  /// Calls body(row index) for every row, on all of torch's threads.
  template <class Body>
  void for_each(const Body& body) const {
    // A thread is worth its start from some 10 us of work on.
    const std::int64_t grain =
        std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width()));
    at::parallel_for(0, size(), grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) body(i);
    });
  }

 private:
  at::Tensor logits_, target_, weight_;
  VocabShard shard_;
  const SoftmaxOps* ops_ = nullptr;
  const std::int64_t* targets_ = nullptr;
  const float* weights_ = nullptr;
  std::int64_t num_classes_ = 0;
};

/// Computes a token's loss and gradient from the stats of its whole row, with the formulas of
/// docs/design/cross_entropy.md, in double.
class TokenLoss {
 public:
  /// `target` as in LogitRows; `vocab_size` known by now. Throws IndexError naming the first target
  /// that is no class.
  TokenLoss(const at::Tensor& target, const std::optional<at::Tensor>& weight,
            const LossTerms& terms, std::int64_t ignore_index, std::int64_t vocab_size);

  struct Values {
    double loss, lse, entropy, accuracy;
  };
  /// All 0 where the token is ignored.
  Values values(std::int64_t idx, const SoftmaxStats& stats) const;
  /// `scale` multiplies the loss. Not of ignored tokens.
  LogitGrad gradient(std::int64_t idx, const SoftmaxStats& stats, double scale) const;
  bool is_ignored(std::int64_t idx) const { return targets_[idx] == ignore_index_; }
  /// The sum of the targets' weights: their number where there are no weights.
  double weight_of_targets() const;

 private:
  double weight_of_target(std::int64_t idx) const {
    return weights_ != nullptr ? weights_[targets_[idx]] : 1.0;
  }

  at::Tensor target_, weight_;
  const std::int64_t* targets_ = nullptr;
  const float* weights_ = nullptr;
  std::int64_t ignore_index_ = -100;
  LossTerms terms_;
  double smooth_ = 0;      ///< label_smoothing / vocab_size
  double weight_sum_ = 0;  ///< of all classes
};

}  // namespace ringcomm
