#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "collectives/call.h"
#include "kernels/reductions/reduce_op.h"

namespace ringcomm {

/// How the ranks of a group stage: with which stores, and in an all_reduce by which algorithm. Rank
/// 0 measures calls of the program, and publishes with each call what all ranks do in the next one
/// (docs/design/collectives.md, "What calls decide").
class StagingChooser {
 public:
  using Clock = std::chrono::steady_clock;

  /// What rank 0 publishes: a bit for each question, such as whether to stream.
  using Answers = std::uint32_t;

  /// `measures`: on rank 0; `measures_algorithms`: where one_shot's end is not what a user tuned,
  /// and ranks have cores of their own: rank 0's time is not the group's where it waits for a core.
  /// `one_shot_max_bytes`: where one_shot ends before it is measured. `now` is another clock in
  /// tests.
  StagingChooser(bool measures, bool measures_algorithms, std::size_t one_shot_max_bytes,
                 Clock::time_point (*now)() = Clock::now)
      : measures_(measures),
        measures_algorithms_(measures_algorithms),
        one_shot_max_bytes_(std::min(one_shot_max_bytes, kNoLimit)),
        now_(now) {
    for (int idx = 0; idx < 2 * kNumSizes; ++idx)
      if (kEighths[idx % kNumSizes] >= 8) kept_ |= 1U << idx;
    next_ = kept_;
  }

  /// The algorithm of an all_reduce that asks for none. Any thread.
  Algorithm algorithm_of(std::size_t num_bytes, std::size_t element_bytes) const {
    const int size_class = class_of(num_bytes, element_bytes);
    const bool is_two_shot =
        size_class == kNone ? num_bytes > one_shot_max_bytes_ : does_next(size_class);
    return is_two_shot ? Algorithm::kTwoShot : Algorithm::kOneShot;
  }

  /// Starts a collective in which this rank moves `num_bytes`; `element_bytes` of an all_reduce
  /// whose algorithm is that of algorithm_of(), or 0.
  void begin(OpKind op, std::size_t num_bytes, std::size_t element_bytes = 0) {
    const bool is_large = num_bytes >= kMinBytes;
    kind_ = is_large && does_next(kStreams) ? cpu::StoreKind::kStreaming : cpu::StoreKind::kCached;
    is_timed_ = false;
    if (!measures_) return;
    const bool is_chosen = measures_algorithms_ && element_bytes > 0;
    const int size_class = is_chosen ? class_of(num_bytes, element_bytes) : kNone;
    if (!is_large && size_class == kNone) return;
    const Question of_stores{
        .bit = kStreams, .op = op, .size = static_cast<int>(std::bit_width(num_bytes))};
    const Question of_algorithm{.bit = size_class};
    const Clock::time_point now = now_();
    const bool is_new = size_class != kNone && (measured_ >> size_class & 1U) == 0;
    if (now >= next_round_at_ || (is_new && num_timed_ == kNumTimed)) {
      const bool asks_algorithm =
          size_class != kNone && (is_new || !is_large || question_.bit == kStreams);
      question_ = asks_algorithm ? of_algorithm : of_stores;
      num_timed_ = 0;
      num_faster_ = 0;
      round_time_ = {};
      next_round_at_ = now + kLongestGap;
    }
    is_timed_ = num_timed_ < kNumTimed &&
                question_ == (question_.bit == kStreams ? of_stores : of_algorithm);
    is_second_ = does_next(question_.bit);
    const int next = num_timed_ + (is_timed_ ? 1 : 0);
    const bool is_measuring = next >= kFirstPair && next < kNumTimed;
    follow(is_measuring ? with_answer(next % 2 != 0) : kept_);
    elapsed_ = -now.time_since_epoch();
  }
  cpu::StoreKind kind() const { return kind_; }
  /// For the next call.
  Answers next() const { return next_.load(std::memory_order_relaxed); }
  /// What rank 0 has published.
  void follow(Answers answers) { next_.store(answers, std::memory_order_relaxed); }
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
    if (num_timed_ >= kFirstPair && is_second_) {
      num_faster_ += elapsed_ < first_ ? 1 : 0;
      // A rank that was stopped is not as slow in the other call of the pair.
      round_time_ += std::min(elapsed_, 8 * first_) + std::min(first_, 8 * elapsed_);
    }
    first_ = elapsed_;
    const bool is_over = ++num_timed_ == kNumTimed;
    next_round_at_ = now_() + (is_over ? kPause * round_time_ : kLongestGap);
    if (!is_over) return;
    // Slow calls, which come in rows on a busy machine, decide few pairs.
    if (num_faster_ >= kNumDecisive) kept_ = with_answer(true);
    if (num_faster_ <= kNumPairs - kNumDecisive) kept_ = with_answer(false);
    measured_ |= 1U << question_.bit;
  }

 private:
  // What a round of calls decides: whether to stream, from calls of one operation and a power of
  // two of their sizes; or whether a class of all_reduce takes two_shot.
  struct Question {
    int bit = kStreams;
    OpKind op = OpKind::kAllReduce;
    int size = 0;
    friend bool operator==(const Question&, const Question&) = default;
  };

  // A smaller call is over before its lines have left the cache.
  static constexpr std::size_t kMinBytes = std::size_t{16} << 10;
  // Classes of an all_reduce: by size, where they begin, in eighths of one_shot's end. One_shot
  // takes up to N / 2 times as long beyond the last. Elements of 16 bits have classes of their own:
  // their sums take longer, their copies do not.
  static constexpr std::array<std::size_t, 11> kEighths = {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  static constexpr int kNumSizes = static_cast<int>(kEighths.size()) - 1;
  static constexpr std::size_t kNoLimit = std::size_t{1} << 48;  // no buffer is longer
  // Beside the classes, the question of stores.
  static constexpr int kStreams = 2 * kNumSizes, kNone = -1;
  // Timed calls of a round: two that may touch the board's regions for the first time, then pairs.
  // As many of these as are decisive change an answer.
  static constexpr int kFirstPair = 2, kNumPairs = 7, kNumDecisive = 5;
  static constexpr int kNumTimed = kFirstPair + 2 * kNumPairs;
  // The time to the next round, in times of a round, half of which is lost at most.
  static constexpr int kPause = 100;
  // Its calls may not come again: then the next call that can be timed begins another one.
  static constexpr Clock::duration kLongestGap = std::chrono::seconds(10);

  bool does_next(int bit) const { return (next() >> bit & 1U) != 0; }
  Answers with_answer(bool is_second) const {
    const Answers bit = 1U << question_.bit;
    return is_second ? kept_ | bit : kept_ & ~bit;
  }

  int class_of(std::size_t num_bytes, std::size_t element_bytes) const {
    const auto end = std::ranges::lower_bound(kEighths, num_bytes, {}, [&](std::size_t eighths) {
      return eighths * one_shot_max_bytes_ / 8;
    });
    if (end == kEighths.begin() || end == kEighths.end()) return kNone;
    return static_cast<int>(end - kEighths.begin()) - 1 + (element_bytes == 2 ? kNumSizes : 0);
  }

  bool measures_;
  bool measures_algorithms_;
  std::size_t one_shot_max_bytes_;
  Clock::time_point (*now_)();
  cpu::StoreKind kind_ = cpu::StoreKind::kCached;
  std::atomic<Answers> next_ = 0;
  // Of the rank that measures.
  Answers kept_ = 0;
  Answers measured_ = 0;  // the questions that have been answered
  Question question_;
  bool is_timed_ = false;
  bool is_second_ = false;  // which of the two ways this call takes
  int num_timed_ = 0;
  int num_faster_ = 0;  // of the pairs those in which the second way was
  Clock::duration elapsed_{}, first_{}, round_time_{};
  Clock::time_point next_round_at_{};
};

}  // namespace ringcomm
