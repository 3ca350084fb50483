#pragma once

// A call of cross-entropy's kernel for clusters of blocks, and its results in float64.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "emulator/kernel_registry.h"
#include "kernels/losses/loss_call.h"
#include "reduce_oracle.h"
#include "third_party/doctest/doctest.h"

namespace ringcomm::testing {

using cuda::LossCall;
using Doubles = std::vector<double>;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr double kUnit = 0x1p-24;
inline constexpr std::int64_t kIgnore = -100;

// ---- a call, and what it is to give

enum class Divisor { kCount, kItems, kOne };

struct LossOptions {
  bool is_float = false;  // else bfloat16
  int width = 1;
  int padding = 0;  // columns after the classes
  unsigned lead_bytes = 0;
  unsigned gap_bytes = 0;  // between rows
  float logit_scale = 1, label_smoothing = 0, z_loss = 0;
  bool has_weights = false;
  Divisor divisor = Divisor::kCount;
  int num_tokens = 7;
  unsigned cluster_blocks = 1, num_clusters = 1;
};

/// Rows of logits in a buffer, and all that a call points to.
class LossCase {
 public:
  explicit LossCase(const LossOptions& options) : options_(options), random_(7) {
    const std::size_t element_bytes = options.is_float ? 4 : 2;
    stride_bytes_ = static_cast<unsigned>(options.width * element_bytes) + options.gap_bytes;
    buffer_.assign(2 * kMargin + options.num_tokens * stride_bytes_, 0xa5);
    values_.resize(options.num_tokens, Doubles(options.width));
    std::normal_distribution<float> normal;
    for (int row = 0; row < options.num_tokens; ++row) {
      targets_.push_back(row % 3 == 2 ? kIgnore : static_cast<std::int64_t>(random_() % classes()));
      for (int column = 0; column < options.width; ++column) set(row, column, 3 * normal(random_));
    }
    for (int i = 0; i < classes(); ++i) weights_.push_back(static_cast<float>(random_() % 7) / 4);
    by_token_.assign(4 * options.num_tokens, 77);
  }

  int classes() const { return options_.width - options_.padding; }
  void set(int row, int column, float value) {
    unsigned char* to = at(row, column);
    if (options_.is_float) {
      std::memcpy(to, &value, 4);
    } else {
      const std::uint16_t bits = oracle::kFormatBFloat16.encode(value);
      std::memcpy(to, &bits, 2);
      value = oracle::kFormatBFloat16.decode(bits);
    }
    values_[row][column] = value;
  }
  void set_target(int row, std::int64_t target) { targets_[row] = target; }
  float logit(int row, int column) const {
    const unsigned char* from = const_cast<LossCase*>(this)->at(row, column);
    if (options_.is_float) {
      float value;
      std::memcpy(&value, from, 4);
      return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, from, 2);
    return oracle::kFormatBFloat16.decode(bits);
  }
  float by_token(int output, int row) const {
    return by_token_[output * options_.num_tokens + row];
  }
  float loss() const { return loss_; }
  double denominator() const { return denominator_; }

  void run() {
    const unsigned row_bytes = static_cast<unsigned>(options_.width) * (options_.is_float ? 4 : 2);
    const unsigned num_vectors = row_bytes / cuda::kVectorBytes + 2;
    LossCall call = {
        .logits = reinterpret_cast<std::byte*>(at(0, 0)),
        .targets = targets_.data(),
        .class_weights = options_.has_weights ? weights_.data() : nullptr,
        .num_items = options_.divisor == Divisor::kItems ? &kItems : nullptr,
        .counts_targets = options_.divisor == Divisor::kCount,
        .by_token = by_token_.data(),
        .denominator = &denominator_,
        .loss = &loss_,
        .num_tokens = options_.num_tokens,
        .row_stride_bytes = stride_bytes_,
        .ignore_index = kIgnore,
        .width = options_.width,
        .num_classes = classes(),
        .segment_vectors = (num_vectors + options_.cluster_blocks - 1) / options_.cluster_blocks,
        .logit_scale = options_.logit_scale,
        .label_smoothing = options_.label_smoothing,
        .z_loss = options_.z_loss};
    REQUIRE(call.segment_vectors <= cuda::kLossThreads * cuda::kVectorsPerThread);
    const unsigned shared_bytes =
        cuda::LossPlan{options_.cluster_blocks, call.segment_vectors}.shared_bytes();
    for (unsigned cluster = 0; cluster < options_.num_clusters; ++cluster)
      run_cluster(call, cluster, shared_bytes);
    emulator::ClusterState one(1, 1, shared_bytes);
    emulator::BlockContext context = one.context(0, 1, 0, 0);
    run_named("sum_losses", call, context);
  }

  /// Everything against float64.
  void check() const {
    double sum = 0, count = 0;
    for (int row = 0; row < options_.num_tokens; ++row) {
      if (targets_[row] == kIgnore) continue;
      count += options_.has_weights ? static_cast<double>(weights_[targets_[row]]) : 1;
    }
    const double divisor = options_.divisor == Divisor::kCount   ? count
                           : options_.divisor == Divisor::kItems ? kItems
                                                                 : 1;
    CHECK(denominator_ == divisor);
    for (int row = 0; row < options_.num_tokens; ++row) {
      CAPTURE(row);
      sum += check_row(row, divisor);
    }
    CHECK(loss_ == doctest::Approx(sum / divisor).epsilon(1e-5));
    check_guards();
  }

  void check_guards() const {
    for (std::size_t i = 0; i < buffer_.size(); ++i) {
      const std::size_t begin = kMargin + options_.lead_bytes;
      const std::size_t row_bytes = stride_bytes_ - options_.gap_bytes;
      const bool is_inside = i >= begin && i < begin + options_.num_tokens * stride_bytes_ &&
                             (i - begin) % stride_bytes_ < row_bytes;
      if (!is_inside && buffer_[i] != 0xa5) FAIL("byte " << i << " was written");
    }
  }

 private:
  static constexpr std::size_t kMargin = 64;
  static constexpr double kItems = 12.5;

  unsigned char* at(int row, int column) {
    const std::size_t element_bytes = options_.is_float ? 4 : 2;
    // The buffer's own place is a multiple of 16.
    return buffer_.data() + kMargin + options_.lead_bytes + row * stride_bytes_ +
           column * element_bytes;
  }

  void run_cluster(const LossCall& call, unsigned cluster, unsigned shared_bytes) const {
    emulator::ClusterState state(options_.cluster_blocks, 1, shared_bytes);
    std::vector<std::thread> blocks;
    for (unsigned rank = 0; rank < options_.cluster_blocks; ++rank)
      blocks.emplace_back([&, rank] {
        emulator::BlockContext context = state.context(cluster, options_.num_clusters, rank, 0);
        const bool smooths = options_.label_smoothing != 0;
        const std::string type = options_.is_float ? "float32" : "bfloat16";
        run_named((smooths ? "smooth_loss_rows_" : "loss_rows_") + type, call, context);
      });
    for (std::thread& block : blocks) block.join();
  }
  static void run_named(const std::string& name, const LossCall& call,
                        emulator::BlockContext& context) {
    const emulator::Kernel* const kernel = emulator::find_kernel("ringcomm_" + name);
    REQUIRE(kernel != nullptr);
    context.block_width = cuda::kLossThreads;
    kernel->run(&call, context);
  }

  double check_row(int row, double divisor) const {
    const std::int64_t target = targets_[row];
    CHECK(by_token(2, row) == 0);
    CHECK(by_token(3, row) == 0);
    if (target == kIgnore) {
      CHECK(by_token(0, row) == 0);
      CHECK(by_token(1, row) == 0);
      for (int column = 0; column < options_.width; ++column) CHECK(logit(row, column) == 0);
      return 0;
    }
    const double scale = options_.logit_scale, smoothing = options_.label_smoothing;
    const double z_loss = options_.z_loss, num = classes();
    const double weight = options_.has_weights ? static_cast<double>(weights_[target]) : 1;
    double most = -kInf, sum = 0, total = 0;
    for (int i = 0; i < num; ++i) most = std::max(most, scale * values_[row][i]);
    for (int i = 0; i < num; ++i) {
      sum += std::exp(scale * values_[row][i] - most);
      total += scale * values_[row][i];
    }
    const double lse = most + std::log(sum), z = scale * values_[row][target];
    const double own = (1 - smoothing) * weight;
    const double loss = own * (lse - z) + smoothing * (lse - total / num) + z_loss * lse * lse;
    const double size = std::fabs(most) + std::log(num) + 1;
    CHECK(std::fabs(by_token(0, row) - loss) <= 16 * kUnit * (std::fabs(loss) + size));
    CHECK(std::fabs(by_token(1, row) - lse) <= 8 * kUnit * size);
    for (int i = 0; i < options_.width; ++i) {
      const double p = i < num ? std::exp(scale * values_[row][i] - lse) : 0;
      const double q = i < num ? own * (i == target) + smoothing / num : 0;
      const double factor = scale / divisor;
      const double expected = (p * (own + smoothing + 2 * z_loss * lse) - q) * factor;
      const double terms = (p * (own + smoothing + 2 * z_loss * std::fabs(lse)) + q) * factor;
      // The error of the exponent: its argument is rounded, and grows with the distance from the
      // largest logit.
      const double of_exp = 12 + 2 * std::fabs(std::log(p + 1e-300));
      const double bound = of_exp * kUnit * terms + 1e-37 * std::fabs(factor) +
                           (options_.is_float ? 0 : std::fabs(expected) * 0x1.01p-8);
      const double found = logit(row, i);
      if (!(std::fabs(found - expected) <= bound))
        FAIL_CHECK("column " << i << ": " << found << ", not " << expected);
    }
    return loss;
  }

  LossOptions options_;
  std::mt19937 random_;
  unsigned stride_bytes_ = 0;
  std::vector<unsigned char> buffer_;
  std::vector<Doubles> values_;
  std::vector<std::int64_t> targets_;
  std::vector<float> weights_, by_token_;
  double denominator_ = -1;
  float loss_ = -1;
};

inline void run_and_check(const LossOptions& options) {
  CAPTURE(options.is_float);
  CAPTURE(options.width);
  CAPTURE(options.padding);
  CAPTURE(options.lead_bytes);
  CAPTURE(options.gap_bytes);
  CAPTURE(options.has_weights);
  CAPTURE(static_cast<int>(options.divisor));
  CAPTURE(options.logit_scale);
  CAPTURE(options.label_smoothing);
  CAPTURE(options.z_loss);
  CAPTURE(options.cluster_blocks);
  CAPTURE(options.num_clusters);
  LossCase test(options);
  test.run();
  test.check();
}

}  // namespace ringcomm::testing
