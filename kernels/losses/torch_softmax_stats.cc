#include "kernels/losses/torch_softmax_stats.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cstring>
#include <string>

namespace ringcomm {
namespace {

// The largest of an entry is 0 on all ranks, so that its sums are added up and its index becomes
// the smallest of all. Numbers of 14 bits add up exactly on up to 1024 ranks.

// 14 bits that depend on all bits of a number (the finalizer of MurmurHash3).
std::uint32_t scatter(std::uint64_t value) {
  value = (value ^ value >> 33) * 0xff51afd7ed558ccd;
  value = (value ^ value >> 33) * 0xc4ceb9fe1a85ec53;
  return static_cast<std::uint32_t>(value >> 50);
}

// A checksum of a shard's range of classes. If the shards are contiguous, the sum over all shards
// is the checksum of the range from 0 to their number of classes. Sizes alone could not distinguish
// two equal shards from two adjacent ones.
float way_of(std::int64_t first, std::int64_t end) {
  return static_cast<float>(scatter(static_cast<std::uint64_t>(end))) -
         static_cast<float>(scatter(static_cast<std::uint64_t>(first)));
}

// The digest of arguments that must be equal on all ranks.
std::uint32_t digest_of(const VocabShard& shard, bool wants_weighted, bool wants_more) {
  std::uint64_t digest = (wants_weighted ? 1 : 0) + (wants_more ? 2 : 0);
  for (const std::uint64_t part : {static_cast<std::uint64_t>(shard.vocab_size),
                                   static_cast<std::uint64_t>(shard.ignore_index),
                                   std::bit_cast<std::uint64_t>(shard.logit_scale),
                                   std::bit_cast<std::uint64_t>(shard.softcap)})
    digest = (digest << 14) + scatter(digest ^ part);
  return scatter(digest);
}

}  // namespace

at::Tensor new_softmax_stats(std::int64_t num_tokens) {
  return at::empty({num_tokens + 1, kNumSoftmaxStats}, at::kFloat);
}

void put_stats(const at::Tensor& stats, std::int64_t idx, const SoftmaxStats& value) {
  std::memcpy(static_cast<float*>(stats.data_ptr()) + idx * kNumSoftmaxStats, &value, sizeof value);
}

SoftmaxStats get_stats(const at::Tensor& stats, std::int64_t idx) {
  SoftmaxStats value;
  std::memcpy(&value, static_cast<const float*>(stats.const_data_ptr()) + idx * kNumSoftmaxStats,
              sizeof value);
  return value;
}

void check_stats(const at::Tensor& stats, std::int64_t num_tokens) {
  TORCH_CHECK_VALUE(num_tokens >= 0 && stats.scalar_type() == at::kFloat && stats.is_contiguous() &&
                        stats.dim() == 2 && stats.size(0) == num_tokens + 1 &&
                        stats.size(1) == kNumSoftmaxStats,
                    "ringcomm: stats for ", num_tokens, " tokens must be contiguous float32 with ",
                    num_tokens + 1, " rows of ", kNumSoftmaxStats, ", got ", stats.scalar_type(),
                    " of shape ", stats.sizes());
}

SoftmaxStats shard_entry(const VocabShard& shard, std::int64_t num_classes, bool wants_weighted,
                         bool wants_more) {
  const std::uint32_t digest = digest_of(shard, wants_weighted, wants_more);
  const std::int64_t first = shard.vocab_start;
  return {.max = 0,
          .sum = static_cast<float>(digest),
          .target = static_cast<float>(num_classes),
          .weighted = num_classes > 0 ? way_of(first, first + num_classes) : 0.0F,
          .entropy = 0,
          .argmax = static_cast<std::int32_t>(digest)};
}

void check_shards(const at::Tensor& stats, int world_size) {
  const SoftmaxStats entry = get_stats(stats, stats.size(0) - 1);
  // All digests are equal if their sum is world_size times the smallest.
  TORCH_CHECK_VALUE(entry.sum == static_cast<float>(entry.argmax) * static_cast<float>(world_size),
                    "ringcomm: the ranks' calls differ in vocab_size, ignore_index, logit_scale, "
                    "softcap, label_smoothing or outputs");
  const auto found = static_cast<std::int64_t>(entry.target);
  TORCH_CHECK_VALUE(entry.weighted == way_of(0, found),
                    "ringcomm: the shards of the vocabulary do not add up: they have ", found,
                    " classes together, but do not cover 0 to ", found,
                    " without gaps; is every vocab_start right?");
}

std::int64_t vocab_size_of(const at::Tensor& stats, std::int64_t expected) {
  const SoftmaxStats entry = get_stats(stats, stats.size(0) - 1);
  const auto found = static_cast<std::int64_t>(entry.target);
  TORCH_CHECK_VALUE(found > 0 && (expected < 0 || found == expected), "ringcomm: the shards have ",
                    found, " classes of the vocabulary's ",
                    expected < 0 ? std::string("1 or more") : std::to_string(expected));
  return found;
}

}  // namespace ringcomm
