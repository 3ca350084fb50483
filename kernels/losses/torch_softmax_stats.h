#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/losses/softmax_merge.h"

namespace ringcomm {

/// The transformation of logits, and this rank's shard of the classes.
struct VocabShard {
  std::int64_t vocab_start = 0;
  std::int64_t vocab_size =
      -1;  ///< of all ranks, without padding; -1: not known before the exchange
  std::int64_t ignore_index = -100;
  double logit_scale = 1;
  double softcap = 0;  ///< 0: none
};

// Stats as tensors of shape (tokens + 1, 6): a SoftmaxStats for each token, and an entry with the
// rank's classes and a digest of its arguments, so that the exchange also checks that the ranks'
// shards and arguments fit together.

at::Tensor new_softmax_stats(std::int64_t num_tokens);
void put_stats(const at::Tensor& stats, std::int64_t idx, const SoftmaxStats& value);
SoftmaxStats get_stats(const at::Tensor& stats, std::int64_t idx);

/// Throws ValueError unless these are stats of `num_tokens` tokens.
void check_stats(const at::Tensor& stats, std::int64_t num_tokens);

/// The last entry of a rank's stats.
SoftmaxStats shard_entry(const VocabShard& shard, std::int64_t num_classes, bool wants_weighted,
                         bool wants_more);

/// Checks merged stats. Throws ValueError on all ranks if the ranks were called with different
/// options or their shards do not form one vocabulary.
void check_shards(const at::Tensor& stats, int world_size);

/// The number of classes of all ranks. ValueError where it is 0 or not `expected` (negative: any).
std::int64_t vocab_size_of(const at::Tensor& stats, std::int64_t expected);

}  // namespace ringcomm
