#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/losses/loss_block.h"

// cross_entropy_and_grad_ with one read and one write of the logits (docs/design/cross_entropy.md).
// A cluster of blocks has a row in its shared memory, and each thread has the exponentials of its
// logits in registers until the sum of all is known. A row is copied in whole vectors; elements of
// adjacent rows in its first and last one count as -infinity and are not stored.

// Older GPUs have no clusters, so images for them do not contain these kernels.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ringcomm::cuda {

inline constexpr float kLog2E = 1.44269504F;
/// Represents no logit: less than all numbers except -infinity, and differences to it are not NaN.
inline constexpr float kLowestLogit = -std::numeric_limits<float>::max();

// ---- sums over tokens, by the threads of one block in one order: the same bits in every block

/// The sum of one number of each thread, returned to all threads. `of_warps` is shared memory.
__device__ double sum_of_threads(GpuRowBlock& block, double number, double* of_warps) {
  number = block.warp_sum(number);
  if (block.thread_idx() % kWarpThreads == 0) of_warps[block.thread_idx() / kWarpThreads] = number;
  block.sync();
  double sum = 0;
  for (unsigned i = 0; i < kLossWarps; ++i) sum += of_warps[i];
  return sum;
}

/// The sum of the weights of all targets that are not ignored.
__device__ double weight_of_targets(GpuRowBlock& block, const LossCall& call, double* of_warps) {
  double weight = 0;
  for (std::int64_t i = block.thread_idx(); i < call.num_tokens; i += kLossThreads) {
    const std::int64_t target = __ldg(call.targets + i);
    if (target == call.ignore_index) continue;
    if (call.class_weights == nullptr)
      weight += 1;
    else if (target >= 0 && target < call.num_classes)
      weight += static_cast<double>(__ldg(call.class_weights + target));
  }
  return sum_of_threads(block, weight, of_warps);
}

/// The kernel after the row kernel, with one block: the tokens' losses divided by the denominator.
__device__ void sum_losses(GpuRowBlock& block, const LossCall& call) {
  double sum = 0;
  for (std::int64_t i = block.thread_idx(); i < call.num_tokens; i += kLossThreads)
    sum += static_cast<double>(call.by_token[i]);
  sum = sum_of_threads(block, sum, block.shared_words().counts);
  if (block.thread_idx() == 0) *call.loss = static_cast<float>(sum / *call.denominator);
}

// ---- rows

__device__ constexpr LossPart no_part() { return {kLowestLogit, 0, 0}; }
// Target columns of rows without a gradient, and with a gradient of NaN.
inline constexpr int kIgnoredTarget = -1;
inline constexpr int kNoClass = -2;

/// The part of a row that a block has: vectors from `at` on, the first of which begins with
/// `column`, which is less than 0 if the row begins within a vector.
struct LossSegment {
  std::byte* at;
  int column;
  unsigned num_vectors;
};

struct LossFactors {
  float prob;    ///< times a thread's exponential,
  float smooth;  ///< less this,
  float target;  ///< and less this of the target
};

/// One block's part of all rows. `kSmooths`: with label smoothing.
template <class Logits, bool kSmooths>
class LossRows {
 public:
  __device__ LossRows(GpuRowBlock& block, const LossCall& call) : block_(block), call_(call) {}

  __device__ void run() {
    const std::int64_t first = block_.cluster_idx(), step = block_.num_clusters();
    // Blocks that the cluster does not have are parts of nothing.
    for (unsigned i = block_.thread_idx(); i < 2 * kMaxClusterBlocks; i += kLossThreads)
      shared_words().of_blocks[i / kMaxClusterBlocks][i % kMaxClusterBlocks] = no_part();
    block_.start();
    int now = column_of(target(first)), next = column_of(target(first + step));
    std::int64_t after = target(first + 2 * step);
    load(first, 0, now);
    load(first + step, 1, next);
    scale_ = static_cast<float>(call_.logit_scale / find_denominator());
    if (kSmooths) smooth_ = call_.label_smoothing / static_cast<float>(call_.num_classes) * scale_;
    unsigned slot = 0, turn = 0;
    for (std::int64_t row = first; row < call_.num_tokens; row += step) {
      const std::int64_t later = target(row + 3 * step);
      const LossSegment segment = segment_of(row);
      block_.await_load(slot, turn);
      if (now == kIgnoredTarget)
        write_zeros(row, slot, segment);
      else
        differentiate(row, now, slot, segment);
      block_.seal();
      store(slot, segment);
      // The store has left the slot before this one free.
      const int column = column_of(after);
      load(row + 2 * step, slot == 0 ? kNumRowSlots - 1 : slot - 1, column);
      now = next, next = column, after = later;
      if (++slot == kNumRowSlots) slot = 0, turn ^= 1;
    }
    block_.drain_stores();
  }

 private:
  static constexpr int kPerVector = Logits::kPerVector;
  using Stored = typename Logits::Stored;
  using Elements = float[kVectorsPerThread][kPerVector];

  __device__ LossShared& shared_words() const { return block_.shared_words(); }
  __device__ Vector* slot_at(unsigned slot) const {
    return reinterpret_cast<Vector*>(block_.shared() + kLossSharedBytes) +
           slot * call_.segment_vectors;
  }
  // An element of a slot, by its bytes: for the compiler, vectors of another type are there.
  __device__ Stored element_at(unsigned slot, int i) const {
    Stored element;
    __builtin_memcpy(&element, place_of(slot, i), sizeof element);
    return element;
  }
  __device__ void put_element(unsigned slot, int i, Stored element) const {
    __builtin_memcpy(place_of(slot, i), &element, sizeof element);
  }
  __device__ void* place_of(unsigned slot, int i) const {
    auto* const begin = reinterpret_cast<std::byte*>(slot_at(slot));
    return __builtin_assume_aligned(begin + i * static_cast<int>(sizeof(Stored)), sizeof(Stored));
  }
  __device__ unsigned lane() const { return block_.thread_idx() % kWarpThreads; }
  __device__ unsigned warp() const { return block_.thread_idx() / kWarpThreads; }

  // ---- targets

  __device__ std::int64_t target(std::int64_t row) const {
    return row < call_.num_tokens ? __ldg(call_.targets + row) : call_.ignore_index;
  }
  __device__ int column_of(std::int64_t target) const {
    if (target == call_.ignore_index) return kIgnoredTarget;
    return target >= 0 && target < call_.num_classes ? static_cast<int>(target) : kNoClass;
  }

  /// Every block adds the targets' weights up by itself, in one order, while its first rows load.
  __device__ double find_denominator() {
    double result = call_.num_items != nullptr ? *call_.num_items
                    : call_.counts_targets ? weight_of_targets(block_, call_, shared_words().counts)
                                           : call_.divisor;
    if (block_.cluster_idx() == 0 && block_.cluster_rank() == 0 && block_.thread_idx() == 0)
      *call_.denominator = result;
    return result;
  }

  // ---- rows in memory

  __device__ LossSegment segment_of(std::int64_t row) const {
    std::byte* const begin = call_.logits + row * call_.row_stride_bytes;
    const auto before =
        static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(begin) % kVectorBytes);
    const unsigned row_bytes = static_cast<unsigned>(call_.width) * unsigned{sizeof(Stored)};
    const unsigned num_vectors = (before + row_bytes + kVectorBytes - 1) / kVectorBytes;
    const unsigned first = block_.cluster_rank() * call_.segment_vectors;
    const unsigned left = num_vectors > first ? num_vectors - first : 0;
    return {.at = begin - before + std::size_t{first} * kVectorBytes,
            .column = static_cast<int>(first) * kPerVector -
                      static_cast<int>(before / unsigned{sizeof(Stored)}),
            .num_vectors = left < call_.segment_vectors ? left : call_.segment_vectors};
  }

  /// An ignored row is not read, but uses its turn of the slot.
  __device__ void load(std::int64_t row, unsigned slot, int column) const {
    if (block_.thread_idx() != 0 || row >= call_.num_tokens) return;
    const LossSegment segment = segment_of(row);
    const unsigned num_bytes = column == kIgnoredTarget ? 0 : segment.num_vectors * kVectorBytes;
    block_.load(slot, reinterpret_cast<std::byte*>(slot_at(slot)), segment.at, num_bytes);
  }

  /// The vectors that hold nothing but the row; and waits for the store before.
  __device__ void store(unsigned slot, const LossSegment& segment) const {
    if (block_.thread_idx() != 0) return;
    // A short row leaves the last blocks without vectors.
    const int end = segment.column + static_cast<int>(segment.num_vectors) * kPerVector;
    const unsigned first = segment.column < 0 ? 1 : 0;
    const bool ends_within = segment.num_vectors > 0 && end > call_.width;
    const unsigned last = segment.num_vectors - (ends_within ? 1 : 0);
    block_.store(segment.at + first * kVectorBytes,
                 reinterpret_cast<const std::byte*>(slot_at(slot) + first),
                 last > first ? (last - first) * kVectorBytes : 0);
    block_.await_stores<1>();
  }

  /// Calls visit(column, i) for the elements i of this thread's vectors that are not entirely in
  /// columns 0 to `end`.
  template <class Visit>
  __device__ void visit_partial(const LossSegment& segment, int end, const Visit& visit) const {
    const int num_whole = (end - segment.column) / kPerVector;
    const unsigned first = num_whole > 0 ? static_cast<unsigned>(num_whole) : 0;
    if (first >= segment.num_vectors && segment.column >= 0) return;
    for (unsigned v = block_.thread_idx(); v < segment.num_vectors; v += kLossThreads) {
      if (v < first && (v > 0 || segment.column >= 0)) continue;
      const int begin = static_cast<int>(v) * kPerVector;
      RINGCOMM_ROLLED
      for (int i = begin; i < begin + kPerVector; ++i) visit(segment.column + i, i);
    }
  }

  /// The row's elements in vectors that other rows share, which no copy of vectors may store.
  __device__ void store_edges(std::int64_t row, unsigned slot, const LossSegment& segment) const {
    auto* const to = reinterpret_cast<Stored*>(call_.logits + row * call_.row_stride_bytes);
    visit_partial(segment, call_.width, [&](int column, int i) {
      if (column >= 0 && column < call_.width) to[column] = element_at(slot, i);
    });
  }

  __device__ void write_zeros(std::int64_t row, unsigned slot, const LossSegment& segment) const {
    for (unsigned v = block_.thread_idx(); v < segment.num_vectors; v += kLossThreads)
      slot_at(slot)[v] = Vector{};
    store_edges(row, slot, segment);
    if (is_first_thread()) put_values(row, 0, 0);
  }

  __device__ bool is_first_thread() const {
    return block_.cluster_rank() == 0 && block_.thread_idx() == 0;
  }

  __device__ void put_values(std::int64_t row, float loss, float lse) const {
    call_.by_token[row] = loss;
    call_.by_token[row + call_.num_tokens] = lse;
    call_.by_token[row + 2 * call_.num_tokens] = 0;
    call_.by_token[row + 3 * call_.num_tokens] = 0;
  }

  // ---- a row

  __device__ void differentiate(std::int64_t row, int target, unsigned slot,
                                const LossSegment& segment) {
    float weight = 1;
    if (call_.class_weights != nullptr && target >= 0) weight = __ldg(call_.class_weights + target);
    visit_partial(segment, call_.num_classes, [&](int column, int i) {
      if (column < 0 || column >= call_.num_classes)
        put_element(slot, i, Logits::store(-std::numeric_limits<float>::infinity()));
    });
    Elements elements;
    const LossPart own = exponentials(slot, segment, elements);
    const LossPart whole = whole_of(own);
    const float target_weight = (1.0F - call_.label_smoothing) * weight;
    const float scale = target == kNoClass ? std::numeric_limits<float>::quiet_NaN() : scale_;
    float prob = target_weight + call_.label_smoothing;
    if (call_.z_loss != 0) prob = __fmaf_rn(2.0F * call_.z_loss, lse_of(whole), prob);
    const float own_power = power_of_2((own.max - whole.max) * scale2());
    const LossFactors factors = {.prob = __fdividef(prob * scale, whole.sum) * own_power,
                                 .smooth = smooth_,
                                 .target = target_weight * scale};
    const int offset = target - segment.column;
    const unsigned target_vector = static_cast<unsigned>(offset) / unsigned{kPerVector};
    const bool is_mine = target >= 0 && offset >= 0 && target_vector < segment.num_vectors &&
                         target_vector % kLossThreads == block_.thread_idx();
    const float x = is_mine ? Logits::load(element_at(slot, offset)) : 0.0F;
    write_gradient(slot, segment, elements, factors);
    if (is_mine) {
      const float power = power_of_2((x - own.max) * scale2());
      const float others = __fmaf_rn(power, factors.prob, -factors.smooth);
      put_element(slot, offset, Logits::store(others - factors.target));
      put_values(row, loss_of(x, whole, target_weight), lse_of(whole));
    }
    if (target == kNoClass && is_first_thread()) put_values(row, scale, lse_of(whole));
    visit_partial(segment, call_.num_classes, [&](int column, int i) {
      if (column >= call_.num_classes) put_element(slot, i, Logits::store(0));
    });
    store_edges(row, slot, segment);
  }

  __device__ float scale2() const { return call_.logit_scale * kLog2E; }
  __device__ float lse_of(const LossPart& whole) const {
    return __fmaf_rn(whole.max, call_.logit_scale, logf(whole.sum));
  }

  /// This thread's logits become exponentials over the largest of its warp; those of the warp.
  __device__ LossPart exponentials(unsigned slot, const LossSegment& segment,
                                   Elements& elements) const {
    const Vector* const vectors = slot_at(slot);
    float most = kLowestLogit;
    RINGCOMM_UNROLL
    for (unsigned j = 0; j < kVectorsPerThread; ++j) {
      const unsigned v = block_.thread_idx() + j * kLossThreads;
      Vector vector = Logits::no_logits();
      if (v < segment.num_vectors) vector = vectors[v];
      most = fmaxf(most, Logits::largest(vector));
      RINGCOMM_UNROLL
      for (int i = 0; i < kPerVector; ++i) elements[j][i] = Logits::get(vector, i);
    }
    most = block_.warp_max(most);
    const int end = segment.column + static_cast<int>(segment.num_vectors) * kPerVector;
    const auto end_column =
        static_cast<unsigned>(end < call_.num_classes ? end : call_.num_classes);
    float sum = 0, total = 0;
    RINGCOMM_UNROLL
    for (unsigned j = 0; j < kVectorsPerThread; ++j) {
      const unsigned v = block_.thread_idx() + j * kLossThreads;
      float of_vector = 0, total_of_vector = 0;
      RINGCOMM_UNROLL
      for (int i = 0; i < kPerVector; ++i) {
        float& element = elements[j][i];
        const unsigned column =
            static_cast<unsigned>(segment.column) + v * kPerVector + static_cast<unsigned>(i);
        if (kSmooths && column < end_column) total_of_vector += element;
        element = power_of_2((element - most) * scale2());
        of_vector += element;
      }
      sum += of_vector;
      total += total_of_vector;
    }
    return {.max = most,
            .sum = block_.warp_sum(sum),
            .total = kSmooths ? block_.warp_sum(total) : 0.0F};
  }

  /// The row's, from those of all warps of the cluster.
  __device__ LossPart whole_of(const LossPart& own) {
    LossShared& shared = shared_words();
    const unsigned exchange = num_exchanges_ % 2, turn = num_exchanges_ / 2 % 2;
    ++num_exchanges_;
    LossPart(&parts)[kMaxClusterBlocks] = shared.of_blocks[exchange];
    if (lane() == 0) shared.of_warps[warp()] = own;
    block_.sync();
    if (warp() == 0) {
      LossPart part = lane() < kLossWarps ? shared.of_warps[lane()] : no_part();
      const float most = block_.warp_max(part.max);
      part.sum = block_.warp_sum(part.sum * power_of_2((part.max - most) * scale2()));
      if (kSmooths) part.total = block_.warp_sum(part.total);
      part.max = most;
      for (unsigned peer = lane(); peer < block_.cluster_blocks(); peer += kWarpThreads)
        block_.send(peer, exchange, parts[block_.cluster_rank()], part);
    }
    block_.await_parts(exchange, turn);
    LossPart whole = no_part();
    RINGCOMM_UNROLL
    for (const LossPart& part : parts) whole.max = fmaxf(whole.max, part.max);
    RINGCOMM_UNROLL
    for (const LossPart& part : parts) {
      const float power = power_of_2((part.max - whole.max) * scale2());
      whole.sum = __fmaf_rn(part.sum, power, whole.sum);
      if (kSmooths) whole.total += part.total;
    }
    return whole;
  }

  __device__ void write_gradient(unsigned slot, const LossSegment& segment, Elements& elements,
                                 const LossFactors& factors) const {
    Vector* const vectors = slot_at(slot);
    RINGCOMM_UNROLL
    for (unsigned j = 0; j < kVectorsPerThread; ++j) {
      const unsigned v = block_.thread_idx() + j * kLossThreads;
      RINGCOMM_UNROLL
      for (float& element : elements[j])
        element = __fmaf_rn(element, factors.prob, -factors.smooth);
      if (v < segment.num_vectors) vectors[v] = Logits::vector_of(elements[j]);
    }
  }

  /// Differences are of numbers near the largest: large logits cancel before they are rounded.
  __device__ float loss_of(float x, const LossPart& whole, float target_weight) const {
    const double scale = call_.logit_scale, log_sum = logf(whole.sum);
    const double lse = scale * whole.max + log_sum;
    double loss = target_weight * (log_sum - scale * (static_cast<double>(x) - whole.max));
    if (kSmooths) loss += call_.label_smoothing * (lse - scale * whole.total / call_.num_classes);
    if (call_.z_loss != 0) loss += call_.z_loss * lse * lse;
    return static_cast<float>(loss);
  }

  GpuRowBlock& block_;
  const LossCall& call_;
  float scale_ = 0;   ///< of gradients: logit_scale over the denominator
  float smooth_ = 0;  ///< of gradients: label_smoothing over the classes, times that
  unsigned num_exchanges_ = 0;
};

template <class Logits, bool kSmooths>
__device__ void loss_rows(GpuRowBlock& block, const LossCall& call) {
  LossRows<Logits, kSmooths>(block, call).run();
}

/// A kernel that calls `body(block, call)`: rows in clusters, the sum in one block. One block for
/// each multiprocessor: 128 registers a thread.
#define RINGCOMM_LOSS_KERNEL(name, ...)                         \
  extern "C" __global__ void __launch_bounds__(kLossThreads, 1) \
      name(const __grid_constant__ LossCall call) {             \
    GpuRowBlock block;                                          \
    __VA_ARGS__(block, call);                                   \
  }
RINGCOMM_LOSS_KERNEL(ringcomm_loss_rows_bfloat16, loss_rows<BFloat16Logits, false>)
RINGCOMM_LOSS_KERNEL(ringcomm_loss_rows_float32, loss_rows<FloatLogits, false>)
RINGCOMM_LOSS_KERNEL(ringcomm_smooth_loss_rows_bfloat16, loss_rows<BFloat16Logits, true>)
RINGCOMM_LOSS_KERNEL(ringcomm_smooth_loss_rows_float32, loss_rows<FloatLogits, true>)
RINGCOMM_LOSS_KERNEL(ringcomm_sum_losses, sum_losses)

}  // namespace ringcomm::cuda

#endif
