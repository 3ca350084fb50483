#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/softmax.h"
#include "ops/cross_entropy.h"

namespace ringcomm {

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
