#include <cstddef>
#include <cstring>
#include <vector>

#include "reduce/reduce_op.h"
#include "third_party/doctest/doctest.h"
#include "transport/shm/context.h"

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
    host::copy_bytes(to, from, num_bytes, host::StoreKind::kCached);
  });
  check_offsets("streaming", [](void* to, const void* from, std::size_t num_bytes) {
    host::copy_bytes(to, from, num_bytes, host::StoreKind::kStreaming);
  });
  host::copy_bytes(nullptr, nullptr, 0, host::StoreKind::kCached);
  host::copy_bytes(nullptr, nullptr, 0, host::StoreKind::kStreaming);
}

TEST_CASE("negative control: a copy of one byte too many or too few is noticed") {
  CHECK_FALSE(copies_exactly(
      [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n + 1); }, 3, 0, 64));
  CHECK_FALSE(copies_exactly(
      [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n - 1); }, 3, 0, 64));
}

// Runs calls of 1 MiB that take so long with plain and with streaming stores; returns how many of
// them streamed.
int run_calls(StoreKindChooser& chooser, int num_calls, float plain, float streaming) {
  int num_streaming = 0;
  for (int i = 0; i < num_calls; ++i) {
    chooser.begin(OpKind::kAllReduce, std::size_t{1} << 20);
    const bool is_streaming = chooser.kind() == host::StoreKind::kStreaming;
    num_streaming += is_streaming ? 1 : 0;
    chooser.count(is_streaming ? streaming : plain);
  }
  return num_streaming;
}

TEST_CASE("the faster kind of store is kept, until the machine changes") {
  StoreKindChooser chooser;
  // Ten calls with the trial of four, then the plain ones, which are faster.
  CHECK(run_calls(chooser, 10, 12, 24) == 4);
  CHECK(run_calls(chooser, 100, 12, 24) == 0);
  // No cache is shared any more: found within two looks, of 64 calls.
  run_calls(chooser, 128 + 10, 46, 16.5F);
  CHECK(run_calls(chooser, 100, 46, 16.5F) == 100);
  // Shared again, which hardly changes the time of the kind that is kept: found by the next trial.
  run_calls(chooser, 512, 1.1F, 16.5F);
  CHECK(run_calls(chooser, 100, 1.1F, 16.5F) <= 4);
  // Neither another operation's calls nor small ones say anything about these.
  chooser.begin(OpKind::kAllGather, std::size_t{1} << 20);
  chooser.count(1000);
  chooser.begin(OpKind::kAllReduce, 1 << 10);
  CHECK(chooser.kind() == host::StoreKind::kCached);
  chooser.count(1000);
  CHECK(run_calls(chooser, 50, 1.1F, 16.5F) <= 4);
}

TEST_CASE("the kind of the next call is rank 0's") {
  StoreKindChooser chooser;
  for (int i = 0; i < 20; ++i) {
    chooser.begin(OpKind::kBroadcast, std::size_t{1} << 20);
    CHECK(chooser.kind() == (i % 3 == 1 ? host::StoreKind::kStreaming : host::StoreKind::kCached));
    chooser.follow(i % 3 == 0);
  }
}

}  // namespace
