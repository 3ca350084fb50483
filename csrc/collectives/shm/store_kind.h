#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "collectives/collective.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// Chooses how staged bytes are stored, while running.
///
/// If the cores of two ranks share a cache, plain stores are 2 times faster; otherwise non-temporal
/// stores are 2 to 3 times faster (docs/experiments.md, "stores"). Virtual machines switch between
/// the two cases several times a minute, and no counter shows it. So the collectives themselves are
/// timed: each size class of each operation times both kinds, keeps the faster, and tries the other
/// one periodically, or soon if the kept one has become much slower.
///
/// A collective's time includes waiting for late ranks. So the shortest recent times are compared,
/// which have no such wait.
class StoreKindChooser {
 public:
  /// Starts timing a collective of `num_bytes` per rank; decides the kind until end().
  void begin(OpKind op, std::size_t num_bytes);
  void end();

  host::StoreKind kind() const { return kind_; }

 private:
  using Clock = std::chrono::steady_clock;

  // Below this a collective is over before its lines have left the cache.
  static constexpr std::size_t kMinBytes = 16 << 10;
  static constexpr int kNumClasses = 16;  // powers of two, starting at kMinBytes
  // Trying the slower kind for 3 calls of 64 costs 5-10 % at most, and a change of the machine is
  // found within 64 calls.
  static constexpr std::uint32_t kKeptCalls = 61;
  static constexpr std::uint32_t kTrialCalls = 3;
  static constexpr std::uint32_t kSlowCalls = 4;  // in a row that are suspicious
  static constexpr float kSuspicious = 1.6F;      // times slower than the best of late
  static constexpr float kForget = 1.03F;         // per call, how the best of late grows old
  static constexpr float kMargin = 0.93F;  // of the kept kind's time that the other must reach

  struct SizeClass {
    std::array<float, 2> best_us = {0, 0};  // by StoreKind; 0 until measured
    bool is_streaming_kept = false;
    bool is_trial = false;
    std::uint32_t num_calls = 0;  // since the trial began or ended
    std::uint32_t num_slow = 0;   // in a row
    bool is_warm = false;         // the first call touches fresh pages, and tells nothing

    bool is_streaming() const { return is_streaming_kept != is_trial; }
  };

  static void record(SizeClass& size_class, float elapsed_us);

  std::array<std::array<SizeClass, kNumClasses>, kNumOpKinds> classes_;
  host::StoreKind kind_ = host::StoreKind::kCached;
  SizeClass* timed_ = nullptr;
  Clock::time_point begin_;
};

}  // namespace ringcomm
