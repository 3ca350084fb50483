// Collectives on buffers in shared memory: results against the oracle, whether all, some or none of
// the ranks have such buffers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "core/annotations.h"
#include "host/shared_arena.h"
#include "sanitizers.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"
#include "transport/shm/context.h"

namespace {
thread_local int num_throws = 0;
}  // namespace

extern "C" {
[[noreturn]] void __real___cxa_throw(void* exception, void* type, void (*destroy)(void*));

[[noreturn]] void __wrap___cxa_throw(void* exception, void* type, void (*destroy)(void*)) {
  ++num_throws;
  __real___cxa_throw(exception, type, destroy);
}
}

namespace {

using namespace ringcomm;
using host::SharedArena;
using testing::Case;
using testing::expect;
using testing::input_of;
using testing::kPatient;
using testing::run_ranks;

// A buffer of the arena, or the heap's.
class Buffer {
 public:
  Buffer(std::size_t num_bytes, bool is_shared)
      : data_(is_shared ? static_cast<std::byte*>(SharedArena::instance().allocate(num_bytes + 8))
                        : new std::byte[num_bytes + 8]),
        num_bytes_(num_bytes),
        is_shared_(is_shared) {
    std::memset(data_, 0x5a, num_bytes + 8);
  }
  ~Buffer() {
    if (is_shared_)
      SharedArena::instance().deallocate(data_);
    else
      delete[] data_;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Off the alignment of vectors.
  std::byte* data() const { return data_ + 8; }
  oracle::Bytes content(std::size_t begin, std::size_t num_bytes) const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(data()) + begin;
    return {bytes, bytes + num_bytes};
  }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_;
  std::size_t num_bytes_;
  bool is_shared_;
};

// One call on this rank, its input and output each one buffer.
void run_on_buffers(Communicator& communicator, const Case& c, bool is_shared,
                    const WaitLimits& limits = kPatient) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const std::size_t shard_bytes = c.num_elems * element_bytes(c.dtype);
  const int num_inputs = c.op == OpKind::kReduceScatter ? world_size : 1;
  const int num_outputs = c.op == OpKind::kAllGather ? world_size : 1;
  Buffer input(shard_bytes * static_cast<std::size_t>(num_inputs), is_shared);
  Buffer output(shard_bytes * static_cast<std::size_t>(num_outputs), is_shared);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (int shard = 0; shard < num_inputs; ++shard) {
    std::byte* data = input.data() + static_cast<std::size_t>(shard) * shard_bytes;
    const oracle::Bytes content = input_of(c, rank, shard);
    std::copy_n(reinterpret_cast<const std::byte*>(content.data()), content.size(), data);
    inputs.push_back(data);
  }
  for (int shard = 0; shard < num_outputs; ++shard)
    outputs.push_back(output.data() + static_cast<std::size_t>(shard) * shard_bytes);
  if (c.is_in_place) outputs[0] = const_cast<void*>(inputs[0]);
  communicator.run({.op = c.op,
                    .dtype = c.dtype,
                    .reduction = c.reduction,
                    .root = c.root,
                    .num_elems = c.num_elems,
                    .inputs = inputs.data(),
                    .outputs = outputs.data()},
                   limits);
  for (int shard = 0; shard < num_outputs; ++shard) {
    const Buffer& result = c.is_in_place ? input : output;
    const oracle::Bytes found =
        result.content(static_cast<std::size_t>(shard) * shard_bytes, shard_bytes);
    oracle::Bytes expected;
    if (c.op == OpKind::kAllGather)
      expected = input_of(c, shard, 0);
    else if (c.op == OpKind::kBroadcast)
      expected = rank == c.root && !c.is_in_place ? oracle::Bytes(shard_bytes, 0x5a)
                                                  : input_of(c, c.root, 0);
    else
      expected = testing::reduced(c, world_size, c.op == OpKind::kReduceScatter ? rank : 0);
    expect(found == expected, "the oracle's result of " + c.to_text());
  }
}

// Whose buffers are shared: bit r for rank r.
void run_case(Communicator& communicator, const Case& c, unsigned shared_ranks) {
  run_on_buffers(communicator, c, (shared_ranks >> communicator.rank() & 1U) != 0);
}

std::uint64_t direct_calls(Communicator& communicator) {
  return communicator.stats().counts(OpKind::kAllReduce, Algorithm::kDirect).num_calls;
}

constexpr unsigned kAll = ~0U;

// ThreadSanitizer sees the buffers, and not the rounds that order them, which the checker
// explores (checker/scenarios_lend.cc).
TEST_SUITE_BEGIN("shared buffers" * doctest::skip(testing::kHasThreadSanitizer));

TEST_CASE("all_reduce on shared buffers, worlds 2 to 5") {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    CAPTURE(world_size);
    run_ranks(world_size, [&](Communicator& communicator) {
      std::uint32_t salt = 0;
      // Just too small; just large enough; blocks and a rest; a chunk of one block and one element.
      const std::size_t least_elems =
          min_direct_bytes(OpKind::kAllReduce, world_size) / sizeof(float);
      for (const std::size_t num_elems : {least_elems - 1, least_elems, least_elems + 7, 100'003UL})
        for (const bool is_in_place : {false, true})
          run_case(communicator,
                   {.num_elems = num_elems, .is_in_place = is_in_place, .salt = ++salt}, kAll);
      expect(direct_calls(communicator) == 6, "six direct calls, and two that are too small");
      const auto counts =
          communicator.stats().counts(OpKind::kAllReduce, Algorithm::kDirect).sent_bytes;
      expect(counts > 0, "bytes counted");
    });
  }
}

TEST_CASE("shared buffers give the bits that staging gives, for every type") {
  run_ranks(3, [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    for (int d = 0; d < kNumDTypes; ++d)
      for (int r = 0; r < kNumReductions; ++r) {
        const auto dtype = static_cast<DType>(d);
        const auto reduction = static_cast<Reduction>(r);
        if (!oracle::has_meaning(reduction, dtype)) continue;
        run_case(communicator,
                 {.dtype = dtype,
                  .reduction = reduction,
                  .num_elems = 20'001,
                  .is_in_place = salt % 2 == 0,
                  .salt = ++salt},
                 kAll);
      }
    for (int turn = 0; turn < 4; ++turn)
      run_case(communicator, {.num_elems = 30'001, .is_random = true, .salt = ++salt}, kAll);
  });
}

TEST_CASE("reduce_scatter, all_gather and broadcast on shared buffers, any ranks sharing") {
  run_ranks(3, [&](Communicator& communicator) {
    std::uint32_t salt = 0;
    for (unsigned shared_ranks = 0; shared_ranks < 8; ++shared_ranks)
      for (const std::size_t num_elems : {0U, 100U, 40'001U, 300'007U})
        for (const OpKind op :
             {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast}) {
          ++salt;
          run_case(communicator,
                   {.op = op,
                    .root = op == OpKind::kBroadcast ? static_cast<int>(salt) % 3 : -1,
                    .num_elems = num_elems,
                    .salt = salt},
                   shared_ranks);
          if (salt % 5 == 0) testing::barrier(communicator);
        }
    expect(num_throws == 0, "no exception, which would take 1 us of each call");
  });
}

thread_local bool is_late = false;

TEST_CASE("no rank leaves a call on shared buffers before all have written to its own") {
  test_step = [](const char* what) {
    if (is_late && std::string_view(what) == "after a cursor advanced, before sleepers wake")
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  for (const OpKind op :
       {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast})
    for (const int late : {0, 1}) {
      run_ranks(2, [&](Communicator& communicator) {
        is_late = communicator.rank() == late;
        run_case(communicator,
                 {.op = op, .root = op == OpKind::kBroadcast ? 0 : -1, .num_elems = 300'007}, kAll);
        is_late = false;
      });
    }
  test_step = nullptr;
}

TEST_CASE("an algorithm that was asked for is taken on shared buffers too") {
  CommunicatorOptions options;
  options.algorithm = Algorithm::kTwoShot;
  run_ranks(
      2,
      [&](Communicator& communicator) {
        run_case(communicator, {.num_elems = 50'000, .salt = 1}, kAll);
        expect(direct_calls(communicator) == 0, "no direct call");
      },
      options);
}

TEST_CASE("a mismatch is found before a byte moves, shared or not") {
  for (const unsigned shared_ranks : {0U, 1U, 2U, 3U}) {
    run_ranks(2, [&](Communicator& communicator) {
      const Case c{.num_elems = communicator.rank() == 0 ? 50'000U : 60'000U, .salt = 1};
      const Error error = testing::error_of([&] { run_case(communicator, c, shared_ranks); });
      testing::expect_error(error, ErrorKind::kMismatch, {"all_reduce #0"});
    });
  }
}

TEST_CASE("shared buffers of a call that failed are free again when all ranks have left") {
  SharedArena& arena = SharedArena::instance();
  const auto num_in_use = [&] {
    arena.deallocate(arena.allocate(8));  // which looks whether ranks have left
    return arena.usage().num_blocks;
  };
  const std::size_t num_blocks = num_in_use();
  std::atomic<bool> has_failed = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      const Error told = testing::error_of([&] { testing::barrier(communicator); });
      testing::expect_error(told, ErrorKind::kMismatch);
      return testing::wait_until([&] { return has_failed.load(); }, "the error of rank 0");
    }
    const Error error =
        testing::error_of([&] { run_case(communicator, {.num_elems = 50'000, .salt = 1}, kAll); });
    testing::expect_error(error, ErrorKind::kMismatch, {"rank 1 called barrier"});
    testing::expect(num_in_use() == num_blocks + 2, "both buffers to be held");
    has_failed = true;
  });
  CHECK(num_in_use() == num_blocks);
}

TEST_CASE("a peer that does not come to a call on shared buffers is named") {
  std::atomic<bool> is_over = false;
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1)
      return testing::wait_until([&] { return is_over.load(); }, "the error of rank 0");
    const testing::Case c{.num_elems = 50'000, .salt = 1};
    const Error error = testing::error_of([&] {
      run_on_buffers(communicator, c, true, testing::within(std::chrono::milliseconds(100)));
    });
    testing::expect_error(error, ErrorKind::kTimeout, {"rank 1"});
    is_over = true;
  });
}

TEST_SUITE_END();

}  // namespace
