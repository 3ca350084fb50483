#include <chrono>
#include <cstddef>
#include <cstring>
#include <vector>

#include "reduce/reduce_op.h"
#include "third_party/doctest/doctest.h"
#include "transport/shm/store_kind_chooser.h"

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

using Clock = StoreKindChooser::Clock;
Clock::time_point fake_now;

// The times of a call in microseconds, by kind of stores.
struct CallTimes {
  int cached;
  int streaming;
};

// One call on rank 0. Returns whether it streamed.
bool run_call(StoreKindChooser& chooser, const CallTimes& times, OpKind op = OpKind::kAllReduce,
              std::size_t num_bytes = std::size_t{1} << 20) {
  chooser.begin(op, num_bytes);
  const bool is_streaming = chooser.kind() == cpu::StoreKind::kStreaming;
  const std::chrono::microseconds time{is_streaming ? times.streaming : times.cached};
  fake_now += time / 2;
  chooser.pause();
  fake_now += std::chrono::seconds(1);  // for a late rank
  chooser.resume();
  fake_now += time - time / 2;
  chooser.end();
  return is_streaming;
}

// Returns how many of them streamed.
int run_calls(StoreKindChooser& chooser, int num_calls, const CallTimes& times) {
  int num_streaming = 0;
  for (int i = 0; i < num_calls; ++i) num_streaming += run_call(chooser, times) ? 1 : 0;
  return num_streaming;
}

StoreKindChooser chooser_with_fake_clock() {
  return StoreKindChooser([] { return fake_now; });
}

// Two that do not count, three with each kind, and one until what they show has been published.
constexpr int kNumMeasured = 9;
constexpr int kNumStreaming = 4;

TEST_CASE("the faster kind of stores is kept after three calls with each") {
  for (const CallTimes& times : {CallTimes{12, 24}, CallTimes{46, 16}}) {
    StoreKindChooser chooser = chooser_with_fake_clock();
    for (int call = 0; call < kNumMeasured; ++call)
      CHECK(run_call(chooser, times) == (call >= kNumMeasured - kNumStreaming));
    CHECK(run_calls(chooser, 2000, times) == (times.streaming < times.cached ? 2000 : 0));
  }
}

TEST_CASE("slow calls, but for one of three, do not decide the kind of stores") {
  StoreKindChooser chooser = chooser_with_fake_clock();
  const int num_cached = kNumMeasured - kNumStreaming;
  for (int call = 0; call < kNumMeasured; ++call) {
    const bool counts = call == num_cached - 1 || call >= num_cached + 2;
    run_call(chooser, counts ? CallTimes{12, 24} : CallTimes{700, 4000});
  }
  CHECK(run_calls(chooser, 100, {12, 24}) == 0);
}

TEST_CASE("the kinds of stores are measured again after four calls in a row of twice the time") {
  StoreKindChooser chooser = chooser_with_fake_clock();
  run_calls(chooser, kNumMeasured, {12, 24});
  for (int i = 0; i < 100; ++i) {
    CHECK(run_calls(chooser, 3, {25, 16}) == 0);
    CHECK_FALSE(run_call(chooser, {24, 16}));  // no more than twice
  }
  CHECK(run_calls(chooser, 4, {46, 16}) == 0);
  CHECK(run_calls(chooser, kNumMeasured, {46, 16}) == kNumStreaming);
  CHECK(run_calls(chooser, 1000, {46, 16}) == 1000);
  // The times of streaming stores are now those that count.
  CHECK(run_calls(chooser, 4, {46, 33}) == 4);
  run_calls(chooser, 1 + kNumMeasured, {12, 33});
  CHECK(run_calls(chooser, 1000, {12, 33}) == 0);
}

TEST_CASE("one call in 4,096 tries the other kind of stores") {
  constexpr int kCallsPerTry = 4096;
  // Of the calls since the measurement, one of which is counted as measured here.
  constexpr int kUntilTry = kCallsPerTry - 2;
  for (const CallTimes& disturbed : {CallTimes{46, 16}, CallTimes{14, 24}}) {
    StoreKindChooser chooser = chooser_with_fake_clock();
    run_calls(chooser, kNumMeasured, disturbed);
    const bool is_streaming = disturbed.streaming < disturbed.cached;
    // Neither kind takes twice the median, and the other one is faster.
    const CallTimes times = is_streaming ? CallTimes{12, 24} : CallTimes{26, 12};
    CHECK(run_calls(chooser, kUntilTry, times) == (is_streaming ? kUntilTry : 0));
    CHECK(run_call(chooser, times) != is_streaming);
    run_calls(chooser, 1 + kNumMeasured, times);
    CHECK(run_calls(chooser, 1000, times) == (is_streaming ? 0 : 1000));
  }
  StoreKindChooser chooser = chooser_with_fake_clock();
  run_calls(chooser, kNumMeasured, {12, 24});
  for (int i = 0; i < 3; ++i) {  // a try that is slower changes nothing
    CHECK(run_calls(chooser, kUntilTry + (i > 0 ? 1 : 0), {12, 24}) == 0);
    CHECK(run_call(chooser, {12, 24}));
  }
}

TEST_CASE("each operation and size class has its own kind of stores") {
  StoreKindChooser chooser = chooser_with_fake_clock();
  run_calls(chooser, kNumMeasured, {46, 16});
  for (int i = 0; i < 50; ++i) {
    CHECK(run_call(chooser, {46, 16}));
    // Neither an operation's calls, nor larger ones, nor small ones tell anything about others.
    const bool has_chosen = i >= kNumMeasured;
    const bool is_gather_streaming =
        run_call(chooser, {1000, 2000}, OpKind::kAllGather, std::size_t{1} << 20);
    const bool is_large_streaming =
        run_call(chooser, {9000, 2000}, OpKind::kAllReduce, std::size_t{1} << 21);
    if (has_chosen) CHECK_FALSE(is_gather_streaming);
    if (has_chosen) CHECK(is_large_streaming);
    CHECK_FALSE(run_call(chooser, {1000, 1}, OpKind::kAllReduce, 1 << 10));
  }
}

TEST_CASE("the kind of the next call is rank 0's") {
  StoreKindChooser chooser = chooser_with_fake_clock();
  for (int i = 0; i < 20; ++i) {
    chooser.begin(OpKind::kBroadcast, std::size_t{1} << 20);
    CHECK(chooser.kind() == (i % 3 == 1 ? cpu::StoreKind::kStreaming : cpu::StoreKind::kCached));
    chooser.follow(i % 3 == 0);
    chooser.end();
  }
}

}  // namespace
