#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "device/reduce_op.h"

namespace ringcomm {

/// Chooses how staged bytes are stored, while running.
///
/// Where the cores of two ranks share a cache, plain stores win by 2 times; where they do not,
/// stores past the cache win by 2 to 3 (docs/experiments.md, "stores"). Virtual machines move
/// between the two several times a minute and no counter tells, so that the only honest probe is
/// the collectives themselves: each size class times both kinds, keeps the faster, and looks at the
/// other again once in a while, or at once when the kept one has become much slower.
class StoreKindChooser {
 public:
  /// Starts timing a collective that stages `num_bytes` in all; decides the kind until end().
  void begin(std::size_t num_bytes);
  void end();

  host::StoreKind kind() const { return kind_; }

 private:
  using Clock = std::chrono::steady_clock;

  // Below this a collective is over before its lines have left the cache; timing it would cost more
  // than it brings.
  static constexpr std::size_t kMinBytes = 16 << 10;
  static constexpr int kNumClasses = 16;  // powers of two from kMinBytes on
  static constexpr std::uint32_t kProbeEvery =
      48;  // collectives of a class between two looks at the other kind
  static constexpr float kSuspicious = 1.6F;  // times slower than usual: look at once

  struct SizeClass {
    std::array<float, 2> mean_us = {0, 0};  // by StoreKind; 0 until measured
    std::uint32_t num_since_probe = 0;
    bool prefers_streaming = false;
    bool is_probe_due = true;
  };

  void record(SizeClass& size_class, float elapsed_us);

  std::array<SizeClass, kNumClasses> classes_;
  host::StoreKind kind_ = host::StoreKind::kCached;
  SizeClass* timed_ = nullptr;
  bool is_probe_ = false;
  Clock::time_point begin_;
};

}  // namespace ringcomm
