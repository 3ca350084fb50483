#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/reductions/reduce_op.h"
#include "third_party/doctest/doctest.h"
#include "transport/shm/staging_chooser.h"

namespace {

using namespace ringcomm;

constexpr std::size_t kMaxOffset = 65;  // one line of 64 bytes and one byte
constexpr unsigned char kGuard = 0xa5;

using CopyFn = void (*)(void* to, const void* from, std::size_t num_bytes);

// Whether a copy at these offsets from a line boundary wrote its bytes and no other.
bool copies_exactly(CopyFn copy, std::size_t to_offset, std::size_t from_offset,
                    std::size_t num_bytes) {
  alignas(64) static unsigned char from[8192];
  alignas(64) static unsigned char to[8192];
  for (std::size_t i = 0; i < sizeof from; ++i)
    from[i] = static_cast<unsigned char>(i * 7 + i / 256);
  std::memset(to, kGuard, sizeof to);
  constexpr std::size_t kMargin = 128;
  copy(to + kMargin + to_offset, from + from_offset, num_bytes);
  for (std::size_t i = 0; i < kMargin + to_offset + num_bytes + kMargin; ++i) {
    const bool is_copied = i >= kMargin + to_offset && i < kMargin + to_offset + num_bytes;
    if (to[i] != (is_copied ? from[from_offset + i - kMargin - to_offset] : kGuard)) return false;
  }
  return true;
}

// Nothing; less than a head; exactly lines; lines with head and tail; many lines.
constexpr std::size_t kSizes[] = {0,   1,   15,  63,  64,   65,   127, 128,
                                  129, 191, 256, 321, 1000, 4096, 4099};

void check_offsets(const char* what, CopyFn copy) {
  for (std::size_t to_offset = 0; to_offset <= kMaxOffset; ++to_offset) {
    for (const std::size_t from_offset : {std::size_t{0}, std::size_t{1}, to_offset}) {
      for (const std::size_t num_bytes : kSizes) {
        if (copies_exactly(copy, to_offset, from_offset, num_bytes)) continue;
        FAIL_CHECK(what << ": " << num_bytes << " bytes to offset " << to_offset << " from offset "
                        << from_offset);
        return;
      }
    }
  }
}

TEST_CASE("copy_bytes with either kind of store") {
  check_offsets("cached", [](void* to, const void* from, std::size_t num_bytes) {
    cpu::copy_bytes(to, from, num_bytes, cpu::StoreKind::kCached);
  });
  check_offsets("streaming", [](void* to, const void* from, std::size_t num_bytes) {
    cpu::copy_bytes(to, from, num_bytes, cpu::StoreKind::kStreaming);
  });
  cpu::copy_bytes(nullptr, nullptr, 0, cpu::StoreKind::kCached);
  cpu::copy_bytes(nullptr, nullptr, 0, cpu::StoreKind::kStreaming);
}

TEST_CASE("negative control: a copy of one byte too many or too few is noticed") {
  CHECK_FALSE(copies_exactly(
      [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n + 1); }, 3, 0, 64));
  CHECK_FALSE(copies_exactly(
      [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n - 1); }, 3, 0, 64));
}

using Clock = StagingChooser::Clock;
constexpr std::size_t kKiB = 1024, kMiB = kKiB * kKiB;
constexpr std::size_t kEnd = 256 * kKiB;  // of one_shot, before it is measured
Clock::time_point fake_now;

// The times of a call in microseconds, by kind of stores.
struct CallTimes {
  int cached;
  int streaming;
};
constexpr CallTimes kShared{12, 24}, kSplit{46, 16};  // caches of two cores

// What each of two ranks moves in a call.
struct Shares {
  std::size_t first = kMiB, second = kMiB;
};

// Two ranks of a group.
class Ranks {
 public:
  Ranks() { fake_now += std::chrono::hours(1); }

  // One call. Returns whether each rank streamed.
  std::pair<bool, bool> call(const CallTimes& times, OpKind op = OpKind::kAllReduce,
                             const Shares& shares = {}) {
    first_.begin(op, shares.first);
    second_.begin(op, shares.second);
    const bool is_streaming = first_.kind() == cpu::StoreKind::kStreaming;
    const std::chrono::microseconds time{is_streaming ? times.streaming : times.cached};
    fake_now += time / 2;
    first_.pause();
    // The wait for a late rank does not count: here the faster kind has it.
    const bool is_faster = is_streaming == (times.streaming < times.cached);
    if (is_faster) fake_now += std::chrono::microseconds(50);
    second_.follow(first_.next());
    first_.resume();
    fake_now += time - time / 2;
    first_.end();
    second_.end();
    return {is_streaming, second_.kind() == cpu::StoreKind::kStreaming};
  }
  // Returns how many of them streamed, on both ranks.
  int calls(int num_calls, const CallTimes& times) {
    int num_streaming = 0;
    for (int i = 0; i < num_calls; ++i) {
      const auto [first, second] = call(times);
      CHECK(first == second);
      num_streaming += first ? 1 : 0;
    }
    return num_streaming;
  }
  // Until the group measures again.
  void pass(std::chrono::milliseconds time) { fake_now += time; }

 private:
  StagingChooser first_{true, false, kEnd, [] { return fake_now; }};
  StagingChooser second_{false, false, kEnd, [] { return fake_now; }};
};

// Two calls that do not count and seven pairs; rank 0 publishes the verdict in the next call.
constexpr int kRound = 16;
constexpr std::chrono::milliseconds kPause{100};  // more than 100 rounds of these times take

TEST_CASE("the faster kind of stores is kept after seven pairs of calls") {
  for (const CallTimes& times : {kShared, kSplit}) {
    Ranks ranks;
    for (int call = 0; call < kRound; ++call) {
      const bool is_streaming = call >= 2 && call % 2 == 1;
      CHECK(ranks.call(times) == std::pair(is_streaming, is_streaming));
    }
    ranks.call(times);
    CHECK(ranks.calls(20, times) == (times.streaming < times.cached ? 20 : 0));
  }
}

TEST_CASE("two pairs of seven do not change the kind of stores") {
  for (const CallTimes& usual : {kShared, kSplit}) {
    const CallTimes& other = usual.cached == kShared.cached ? kSplit : kShared;
    Ranks ranks;
    for (int call = 0; call < kRound; ++call) ranks.call(call >= 6 && call < 10 ? other : usual);
    ranks.call(usual);
    CHECK(ranks.calls(20, usual) == (usual.streaming < usual.cached ? 20 : 0));
  }
}

TEST_CASE("a kind of stores that is faster in four pairs of seven is not taken") {
  Ranks ranks;
  for (int call = 0; call < kRound; ++call) ranks.call(call < 10 ? kSplit : kShared);
  ranks.call(kShared);
  CHECK(ranks.calls(20, kShared) == 0);
}

TEST_CASE("the kinds of stores are measured again after a hundred times of a round") {
  Ranks ranks;
  ranks.calls(kRound + 1, kShared);
  CHECK(ranks.calls(5, kSplit) == 0);  // not yet
  ranks.pass(kPause);
  CHECK(ranks.calls(kRound, kSplit) == 7);
  ranks.call(kSplit);
  CHECK(ranks.calls(20, kSplit) == 20);
  ranks.pass(kPause);
  CHECK(ranks.calls(kRound, kShared) == 9);  // the two that do not count are of the kept kind
  ranks.call(kShared);
  CHECK(ranks.calls(20, kShared) == 0);
}

TEST_CASE("calls of other kinds and sizes are not compared, and use what was found") {
  Ranks ranks;
  for (int i = 0; i < kRound + 1; ++i) {
    ranks.call(kSplit);
    ranks.call({1, 4000}, OpKind::kAllGather);
    ranks.call({1, 4000}, OpKind::kAllReduce, {8 * kMiB, 8 * kMiB});
    CHECK(ranks.call({1, 1}, OpKind::kAllReduce, {1 << 10, 1 << 10}) == std::pair(false, false));
  }
  CHECK(ranks.call(kSplit, OpKind::kAllGather) == std::pair(true, true));
  CHECK(ranks.call(kSplit) == std::pair(true, true));
}

TEST_CASE("a round whose calls do not come again ends after ten seconds") {
  Ranks ranks;
  for (int i = 0; i < 3; ++i) ranks.call(kSplit, OpKind::kBroadcast);
  ranks.pass(std::chrono::seconds(10));
  ranks.calls(kRound + 1, kSplit);
  CHECK(ranks.calls(20, kSplit) == 20);
}

// As an autotuner whose budget of time ended its samples,
// https://github.com/AutoPas/AutoPas/pull/995.
TEST_CASE("a round of calls that take long ends") {
  constexpr CallTimes kLong{800'000, 1'600'000};
  Ranks ranks;
  ranks.calls(kRound + 1, kLong);
  CHECK(ranks.calls(40, kLong) == 0);
}

// As of a stalled sample, https://github.com/ahrefs/ocannl/issues/855.
TEST_CASE("a stop of a rank in a measured call does not put the next round off") {
  constexpr CallTimes kStopped{5'000'000, 5'000'000};
  for (int stopped = 0; stopped < kRound; ++stopped) {
    Ranks ranks;
    for (int call = 0; call < kRound; ++call) ranks.call(call == stopped ? kStopped : kSplit);
    ranks.call(kSplit);
    CHECK(ranks.calls(20, kSplit) == 20);
    ranks.pass(std::chrono::seconds(1));
    ranks.calls(kRound + 1, kShared);
    CHECK(ranks.calls(20, kShared) == 0);
  }
}

TEST_CASE("ranks whose shares differ stream what they have much of") {
  constexpr std::size_t kSmall = std::size_t{8} << 10, kMedium = std::size_t{32} << 10;
  Ranks ranks;
  int num_streaming = 0;
  for (int i = 0; i < 300; ++i) {
    ranks.call(kSplit);
    // An all_to_all of experts: rank 0 has few tokens, more, or as many.
    const std::size_t share = i % 3 == 0 ? kSmall : i % 3 == 1 ? kMedium : 4 * kMiB;
    const auto [first, second] = ranks.call(kSplit, OpKind::kAllToAll, {share, 4 * kMiB});
    num_streaming += second ? 1 : 0;
    CHECK((!first || share >= kMedium));
  }
  CHECK(num_streaming > 250);
}

// Two ranks of a group that call all_reduce, whose times depend on the algorithm.
struct AlgorithmRanks {
  explicit AlgorithmRanks(bool measures = true)
      : first(true, measures, kEnd, [] { return fake_now; }) {
    fake_now += std::chrono::hours(1);
  }

  // How many of the calls took two_shot, on both ranks.
  int calls(int num_calls, std::size_t num_bytes, int one_shot_us, int two_shot_us,
            std::size_t element_bytes = 4) {
    int num_two_shot = 0;
    for (int i = 0; i < num_calls; ++i) {
      const bool is_two_shot = first.algorithm_of(num_bytes, element_bytes) == Algorithm::kTwoShot;
      CHECK(is_two_shot == (second.algorithm_of(num_bytes, element_bytes) == Algorithm::kTwoShot));
      first.begin(OpKind::kAllReduce, num_bytes, element_bytes);
      second.begin(OpKind::kAllReduce, num_bytes, element_bytes);
      first.pause();
      second.follow(first.next());
      first.resume();
      fake_now += std::chrono::microseconds(is_two_shot ? two_shot_us : one_shot_us);
      first.end();
      second.end();
      num_two_shot += is_two_shot ? 1 : 0;
    }
    return num_two_shot;
  }

  StagingChooser first;
  StagingChooser second{false, true, kEnd, [] { return fake_now; }};
};

TEST_CASE("an all_reduce takes the algorithm that was faster for its size and elements") {
  AlgorithmRanks ranks;
  CHECK(ranks.calls(1, 384 * kKiB, 40, 50) == 1);  // before it is measured
  ranks.calls(kRound, 384 * kKiB, 40, 50);
  CHECK(ranks.calls(20, 384 * kKiB, 40, 50) == 0);
  CHECK(ranks.calls(1, 257 * kKiB, 40, 50) == 0);  // of the same class
  // The next classes have their own rounds, which do not wait.
  for (const std::size_t num_bytes : {256 * kKiB, 385 * kKiB}) {
    ranks.calls(kRound + 1, num_bytes, 50, 40);
    CHECK(ranks.calls(20, num_bytes, 50, 40) == 20);
  }
  ranks.calls(kRound + 1, 384 * kKiB, 50, 40, 2);
  CHECK(ranks.calls(20, 384 * kKiB, 50, 40, 2) == 20);
  CHECK(ranks.calls(1, 384 * kKiB, 40, 50) == 0);  // what was found stays
}

TEST_CASE("the algorithm is measured again, in turn with the stores") {
  AlgorithmRanks ranks;
  ranks.calls(kRound + 1, 384 * kKiB, 40, 50);
  for (int round = 0; round < 2; ++round) {
    fake_now += kPause;
    ranks.calls(kRound + 1, 384 * kKiB, 50, 40);
  }
  CHECK(ranks.calls(20, 384 * kKiB, 50, 40) == 20);
}

TEST_CASE("an algorithm is not tried far from its limit, nor where that is not measured") {
  AlgorithmRanks ranks;
  CHECK(ranks.calls(3 * kRound, 64 * kKiB, 50, 40) == 0);
  CHECK(ranks.calls(3 * kRound, 2 * kMiB + 1, 40, 50) == 3 * kRound);
  AlgorithmRanks kept(false);
  CHECK(kept.calls(3 * kRound, kEnd, 50, 40) == 0);
  CHECK(kept.calls(3 * kRound, kEnd + 1, 40, 50) == 3 * kRound);
}

}  // namespace
