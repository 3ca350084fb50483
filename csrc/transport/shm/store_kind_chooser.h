#pragma once

#include <array>
#include <chrono>
#include <cstddef>

#include "collectives/call.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// Chooses how staged bytes are stored (docs/design/collectives.md, "How staged bytes are stored").
/// Which kind is faster depends on whether two ranks' cores share a cache, which no counter shows.
/// So collectives are timed, by operation and size class; rank 0 decides for all.
class StoreKindChooser {
 public:
  using Clock = std::chrono::steady_clock;

  /// `now` is another clock in tests.
  explicit StoreKindChooser(Clock::time_point (*now)() = Clock::now) : now_(now) {}

  /// Starts a collective of `num_bytes` per rank.
  void begin(OpKind op, std::size_t num_bytes);
  cpu::StoreKind kind() const { return kind_; }
  bool is_next_streaming() const { return class_ != nullptr && class_->is_next_streaming; }
  /// What rank 0 has published.
  void follow(bool is_next_streaming) {
    if (class_ != nullptr) class_->is_next_streaming = is_next_streaming;
  }
  /// Stops and continues the time of the collective: the wait for late ranks does not count.
  void pause() {
    if (class_ != nullptr) elapsed_ += now_().time_since_epoch();
  }
  void resume() {
    if (class_ != nullptr) elapsed_ -= now_().time_since_epoch();
  }
  void end();

 private:
  struct SizeClass {
    // Of the first two calls, of three with cached and of three with streaming stores. The first
    // two touch new memory: each uses another region of the board.
    std::array<Clock::duration, 8> times = {};
    std::size_t num_times = 0;
    int num_kept = 0;                // calls since the measurement, or the last try
    int num_doubled = 0;             // calls in a row
    bool is_next_streaming = false;  // what rank 0 publishes

    std::array<Clock::duration, 3> sorted(std::size_t first) const;  // three of the times
    void measure_again() {
      num_times = 0;
      num_kept = num_doubled = 0;
    }
  };

  Clock::time_point (*now_)();
  std::array<std::array<SizeClass, 16>, kNumOpKinds> classes_;  // powers of two from 16 KiB on
  SizeClass* class_ = nullptr;  // of the current collective, if its kind matters
  cpu::StoreKind kind_ = cpu::StoreKind::kCached;
  Clock::duration elapsed_{};
};

}  // namespace ringcomm
