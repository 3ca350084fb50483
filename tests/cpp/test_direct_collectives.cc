// Collectives on buffers in shared memory: results against the oracle, whether all, some or none of
// the ranks have such buffers.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
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
using testing::kPatient;
using testing::run_ranks;

// Memory of the arena, or of the heap; off the alignment of vectors.
std::shared_ptr<std::byte> memory_of(std::size_t num_bytes, bool is_shared) {
  constexpr std::size_t kOffset = 8;
  void* begin = is_shared ? SharedArena::instance().allocate(num_bytes + kOffset)
                          : ::operator new(num_bytes + kOffset);
  return {static_cast<std::byte*>(begin) + kOffset, [begin, is_shared](std::byte*) {
            if (is_shared)
              SharedArena::instance().deallocate(begin);
            else
              ::operator delete(begin);
          }};
}

// One call on this rank, its inputs and its outputs each in one piece.
void run_on_buffers(Communicator& communicator, const Case& c, bool is_shared,
                    const WaitLimits& limits = kPatient) {
  const int world_size = communicator.world_size();
  const auto world = static_cast<std::size_t>(world_size);
  const std::size_t shard_bytes = c.num_elems * element_bytes(c.dtype);
  testing::CaseBuffers buffers(c, communicator.rank(), world_size);
  const Collective apart = buffers.call();
  std::vector<const void*> inputs(c.op == OpKind::kReduceScatter ? world : 1);
  std::vector<void*> outputs(c.op == OpKind::kAllGather ? world : 1);
  const auto input = memory_of(shard_bytes * inputs.size(), is_shared);
  const auto output = memory_of(shard_bytes * outputs.size(), is_shared);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    inputs[i] = std::memcpy(input.get() + i * shard_bytes, apart.inputs[i], shard_bytes);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    outputs[i] = c.is_in_place
                     ? const_cast<void*>(inputs[i])
                     : std::memcpy(output.get() + i * shard_bytes, apart.outputs[i], shard_bytes);
  Collective call = apart;
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  communicator.run(std::move(call), limits);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    std::memcpy(apart.outputs[i], outputs[i], shard_bytes);
  buffers.check();
}

// Whose buffers are shared: bit r for rank r.
void run_case(Communicator& communicator, const Case& c, unsigned shared_ranks) {
  run_on_buffers(communicator, c, (shared_ranks >> communicator.rank() & 1U) != 0);
}

std::uint64_t direct_calls(Communicator& communicator) {
  return communicator.stats().counts(OpKind::kAllReduce, Algorithm::kDirect).num_calls;
}

constexpr unsigned kAll = ~0U;
const std::vector<OpKind> kDirectOps = {OpKind::kAllReduce, OpKind::kReduceScatter,
                                        OpKind::kAllGather, OpKind::kBroadcast};

void run_cases(Communicator& communicator, const testing::CaseTable& table,
               unsigned shared_ranks = kAll) {
  for (const Case& c : table.of(communicator.world_size())) {
    run_case(communicator, c, shared_ranks);
    if (c.salt % 5 == 0) testing::barrier(communicator);
  }
}

// ThreadSanitizer sees the buffers, and not the rounds that order them, which the checker
// explores (checker/scenarios_lend.cc).
TEST_SUITE_BEGIN("shared buffers" * doctest::skip(testing::kHasThreadSanitizer));

TEST_CASE("all_reduce on shared buffers, worlds 2 to 5") {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    CAPTURE(world_size);
    run_ranks(world_size, [&](Communicator& communicator) {
      // Just too small; just large enough; blocks and a rest; a chunk of one block and one element.
      const std::size_t least_elems =
          min_zero_copy_bytes(OpKind::kAllReduce, world_size) / sizeof(float);
      run_cases(communicator, {.counts = {least_elems - 1, least_elems, least_elems + 7, 100'003},
                               .ops = {OpKind::kAllReduce}});
      expect(direct_calls(communicator) == 6, "six direct calls, and two that are too small");
      expect(communicator.stats().counts(OpKind::kAllReduce, Algorithm::kDirect).sent_bytes > 0,
             "bytes counted");
    });
  }
}

TEST_CASE("shared buffers give the bits that staging gives, for every type") {
  run_ranks(3, [&](Communicator& communicator) {
    run_cases(communicator, {.counts = {20'001},
                             .ops = {OpKind::kAllReduce},
                             .dtypes = testing::all_of<DType>(kNumDTypes),
                             .reductions = testing::all_of<Reduction>(kNumReductions),
                             .in_place = {}});
    run_cases(communicator, {.counts = {30'001, 30'002, 30'003, 30'004},
                             .ops = {OpKind::kAllReduce},
                             .in_place = {false},
                             .is_random = true});
  });
}

TEST_CASE("reduce_scatter, all_gather and broadcast on shared buffers, any ranks sharing") {
  run_ranks(3, [&](Communicator& communicator) {
    for (unsigned shared_ranks = 0; shared_ranks < 8; ++shared_ranks)
      run_cases(communicator,
                {.counts = {0, 100, 40'001, 300'007}, .ops = kDirectOps, .in_place = {false}},
                shared_ranks);
    expect(num_throws == 0, "no exception, which would take 1 us of each call");
  });
}

thread_local bool is_late = false;

TEST_CASE("no rank leaves a call on shared buffers before all have written to its own") {
  test_step = [](const char* what) {
    if (is_late && std::string_view(what) == "after a cursor advanced, before sleepers wake")
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  for (const OpKind op : kDirectOps)
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
