#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "collectives/collective.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// Chooses how staged bytes are stored: plain stores are 2 times faster if the cores of two ranks
/// share a cache, and otherwise 2 to 3 times slower (docs/experiments.md, "stores"). A virtual
/// machine switches between the two cases, and no counter shows it. So the collectives are timed,
/// by operation and size class. The first calls of a class try both kinds, the others use the
/// faster, until the time doubles or 512 calls are made. Rank 0 publishes the kind of the class's
/// next call in each call: a rank that tried alone would disturb the others' times.
class StoreKindChooser {
 public:
  /// Starts a collective of `num_bytes` per rank.
  void begin(OpKind op, std::size_t num_bytes);
  host::StoreKind kind() const { return kind_; }
  bool is_next_streaming() const { return class_ != nullptr && class_->is_next_streaming; }
  /// What rank 0 has published.
  void follow(bool is_next_streaming) {
    if (class_ != nullptr) class_->is_next_streaming = is_next_streaming;
  }
  /// Stops and continues the time of the collective: the wait for late ranks does not count.
  void pause() {
    if (class_ != nullptr) elapsed_ += Clock::now().time_since_epoch();
  }
  void resume() {
    if (class_ != nullptr) elapsed_ -= Clock::now().time_since_epoch();
  }
  void end() {
    pause();
    count(std::chrono::duration<float>(elapsed_).count());
  }
  void count(float seconds);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr float kNever = std::numeric_limits<float>::infinity();

  // The shortest times, because the others include later waits.
  struct SizeClass {
    std::array<float, 2> best = {kNever, kNever};  // by StoreKind, since the last trial
    float recent_best = kNever;                    // of up to 64 calls
    std::uint32_t num_calls = 0;                   // since the last trial began
    bool is_next_streaming = false;
  };

  std::array<std::array<SizeClass, 16>, kNumOpKinds> classes_;  // powers of two from 16 KiB on
  SizeClass* class_ = nullptr;  // of the current collective, if its kind matters
  host::StoreKind kind_ = host::StoreKind::kCached;
  Clock::duration elapsed_{};
};

}  // namespace ringcomm
