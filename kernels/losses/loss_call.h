#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ringcomm::cuda {

/// One call of cross_entropy_and_grad_: rows of logits that become their own gradient.
struct LossCall {
  std::byte* logits = nullptr;            ///< of the first row, aligned to an element
  const std::int64_t* targets = nullptr;  ///< (tokens)
  const float* class_weights = nullptr;   ///< (classes); null: all 1
  /// The divisor of the losses: this word, else the sum of the targets' weights, else a number.
  const double* num_items = nullptr;
  bool counts_targets = false;
  double divisor = 1;
  float* by_token = nullptr;      ///< (4, tokens): loss, lse and two rows of zeros
  double* denominator = nullptr;  ///< gets what losses are divided by
  float* loss = nullptr;          ///< gets their sum over that
  std::int64_t num_tokens = 0;
  std::int64_t row_stride_bytes = 0;
  std::int64_t ignore_index = -100;
  std::int32_t width = 0;             ///< elements of a row, padding included
  std::int32_t num_classes = 0;       ///< at most that
  std::uint32_t segment_vectors = 0;  ///< of a row, for each block of a cluster; see LossPlan
  float logit_scale = 1;              ///< positive
  float label_smoothing = 0;          ///< only without class weights
  float z_loss = 0;
};

inline constexpr unsigned kLossThreads = 512;
inline constexpr unsigned kMaxClusterBlocks = 8;  ///< more are not portable
/// One row is computed with, one is loaded and one is stored.
inline constexpr unsigned kNumRowSlots = 3;
/// The exchanges of a row's parts in a cluster: two rows in turn.
inline constexpr unsigned kNumExchanges = 2;
inline constexpr unsigned kVectorBytes = 16;
/// Elements of a thread stay in registers: 64 of 16 bits.
inline constexpr unsigned kVectorsPerThread = 8;
/// In front of the slots in a block's shared memory: barriers and sums.
inline constexpr unsigned kLossSharedBytes = 1152;

/// How a cluster of blocks divides a row.
struct LossPlan {
  unsigned cluster_blocks = 1;
  std::uint32_t segment_vectors = 0;  ///< of 16 bytes, at most, for each block

  constexpr unsigned shared_bytes() const {
    return kLossSharedBytes + kNumRowSlots * segment_vectors * kVectorBytes;
  }
};

/// The smallest cluster that holds a row in registers and shared memory. None for rows over 512
/// KiB, or too short for one block. A row that is not aligned to 16 bytes uses one more vector.
constexpr std::optional<LossPlan> plan_loss(std::int64_t row_bytes, bool is_aligned) {
  constexpr std::int64_t kMinRowBytes = 32 << 10;
  constexpr std::int64_t kMostVectors = kLossThreads * kVectorsPerThread;
  const std::int64_t num_vectors =
      (row_bytes + kVectorBytes - 1) / kVectorBytes + (is_aligned ? 0 : 1);
  if (row_bytes < kMinRowBytes) return std::nullopt;
  for (unsigned blocks = 1; blocks <= kMaxClusterBlocks; blocks *= 2) {
    const std::int64_t segment = (num_vectors + blocks - 1) / blocks;
    if (segment <= kMostVectors)
      return LossPlan{.cluster_blocks = blocks,
                      .segment_vectors = static_cast<std::uint32_t>(segment)};
  }
  return std::nullopt;
}

// 227 KiB is what a block can have on sm_90 and sm_100.
static_assert(kLossSharedBytes + kNumRowSlots * kLossThreads * kVectorsPerThread * kVectorBytes <=
              227 << 10);

/// The partial result of some logits of a row.
struct LossPart {
  float max;    ///< the lowest number without any above -infinity
  float sum;    ///< of exp(logit_scale * (x - max))
  float total;  ///< of x, for label smoothing
  float unused = 0;
};
static_assert(sizeof(LossPart) == kVectorBytes);

/// In front of the slots in shared memory.
struct LossShared {
  std::uint64_t loaded[kNumRowSlots];      ///< barriers of a GPU's block
  std::uint64_t exchanged[kNumExchanges];  ///< the same
  alignas(kVectorBytes) LossPart of_blocks[kNumExchanges][kMaxClusterBlocks];
  LossPart of_warps[32];
  double counts[32];
};
static_assert(sizeof(LossShared) <= kLossSharedBytes);

}  // namespace ringcomm::cuda
