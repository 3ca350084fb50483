#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <utility>

#include "collectives/call.h"
#include "kernels/reductions/reduce_op.h"

namespace ringcomm {

/// How the ranks of a group store what they stage: one flag, which rank 0 measures and publishes
/// with each call for the next one (docs/design/collectives.md, "How staged bytes are stored").
class StoreKindChooser {
 public:
  using Clock = std::chrono::steady_clock;

  /// `measures`: on rank 0. `now` is another clock in tests.
  explicit StoreKindChooser(bool measures, Clock::time_point (*now)() = Clock::now)
      : measures_(measures), now_(now) {}

  /// Starts a collective in which this rank moves `num_bytes`.
  void begin(OpKind op, std::size_t num_bytes) {
    const bool is_large = num_bytes >= kMinBytes;
    kind_ = is_large && is_next_streaming_ ? cpu::StoreKind::kStreaming : cpu::StoreKind::kCached;
    is_timed_ = false;
    if (!measures_ || !is_large) return;
    const std::pair size_class(op, static_cast<int>(std::bit_width(num_bytes)));
    const Clock::time_point now = now_();
    if (now >= next_round_at_) {
      class_ = size_class;
      num_timed_ = 0;
      fastest_.fill(Clock::duration::max());
      round_time_ = {};
      next_round_at_ = now + kLongestRound;
    }
    is_timed_ = num_timed_ < kNumTimed && size_class == class_;
    const int next = num_timed_ + (is_timed_ ? 1 : 0);
    is_next_streaming_ = next < kFirstPair || next >= kNumTimed ? is_kept_ : next % 2 != 0;
    elapsed_ = -now.time_since_epoch();
  }
  cpu::StoreKind kind() const { return kind_; }
  bool is_next_streaming() const { return is_next_streaming_; }
  /// What rank 0 has published.
  void follow(bool is_next_streaming) { is_next_streaming_ = is_next_streaming; }
  /// Stops and continues the time of the collective: the wait for late ranks does not count.
  void pause() {
    if (is_timed_) elapsed_ += now_().time_since_epoch();
  }
  void resume() {
    if (is_timed_) elapsed_ -= now_().time_since_epoch();
  }
  void end() {
    if (!is_timed_) return;
    pause();
    round_time_ += elapsed_;
    auto& fastest = fastest_[kind_ == cpu::StoreKind::kStreaming ? 1 : 0];
    if (num_timed_ >= kFirstPair) fastest = std::min(fastest, elapsed_);
    if (++num_timed_ < kNumTimed) return;
    is_kept_ = fastest_[1] < fastest_[0];
    next_round_at_ = now_() + kPause * round_time_;
  }

 private:
  // A smaller call is over before its lines have left the cache.
  static constexpr std::size_t kMinBytes = std::size_t{16} << 10;
  // Timed calls of a round: two that may touch the board's regions for the first time, three pairs.
  static constexpr int kFirstPair = 2, kNumTimed = 8;
  // The time to the next round, in times of a round, half of which is lost at most.
  static constexpr int kPause = 100;
  // Its calls may not come again: then the next large call begins another one.
  static constexpr std::chrono::seconds kLongestRound{10};

  bool measures_;
  Clock::time_point (*now_)();
  cpu::StoreKind kind_ = cpu::StoreKind::kCached;
  bool is_next_streaming_ = false;
  // Of the rank that measures.
  bool is_kept_ = false;  // whether streaming stores were the faster ones
  bool is_timed_ = false;
  std::pair<OpKind, int> class_ = {};  // of the round's calls: and a power of two of their sizes
  int num_timed_ = 0;
  std::array<Clock::duration, 2> fastest_ = {};  // of the pairs, by kind
  Clock::duration elapsed_{}, round_time_{};
  Clock::time_point next_round_at_{};
};

}  // namespace ringcomm
