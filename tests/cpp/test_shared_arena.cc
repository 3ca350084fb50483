// Memory that peers can map: allocation of blocks, pages returned to the system, and forked
// children. Collectives on buffers in it: results against the oracle, whether all, some or none of
// the ranks have such buffers.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "children.h"
#include "collective_case.h"
#include "core/annotations.h"
#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/shared_arena.h"
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
using namespace ringcomm::host;
using namespace ringcomm::testing;

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
// explores (checker/scenarios_board.cc).
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

// ---- the memory

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t free_bytes(const BlockList& list) {
  std::size_t total = 0;
  for (const auto& [offset, block] : list.blocks())
    if (block.state == BlockList::State::kFree) total += block.num_bytes;
  return total;
}

TEST_CASE("blocks are aligned, apart, and neighbours that are free become one") {
  constexpr std::size_t kTotal = 1 << 16;
  BlockList list(kTotal);
  std::map<std::size_t, std::size_t> used;
  std::size_t used_bytes = 0;
  std::mt19937 random(7);
  int num_refused = 0;
  for (int turn = 0; turn < 20'000; ++turn) {
    if (random() % 2 == 0 || used.empty()) {
      const std::size_t num_bytes = 1 + random() % 3000;
      const std::size_t alignment = std::size_t{1} << (random() % 11);
      const auto offset = list.allocate(num_bytes, alignment);
      if (!offset) {
        ++num_refused;
        continue;
      }
      CHECK(*offset % alignment == 0);
      CHECK(*offset + num_bytes <= kTotal);
      const auto next = used.lower_bound(*offset);
      if (next != used.end()) CHECK(*offset + num_bytes <= next->first);
      if (next != used.begin()) CHECK(std::prev(next)->first + std::prev(next)->second <= *offset);
      used.emplace(*offset, num_bytes);
      used_bytes += num_bytes;
    } else {
      const auto victim = std::next(used.begin(), static_cast<long>(random() % used.size()));
      CHECK(list.deallocate(victim->first) == victim->second);
      used_bytes -= victim->second;
      used.erase(victim);
    }
    CHECK(free_bytes(list) == kTotal - used_bytes);
  }
  CHECK(num_refused > 0);
  for (const auto& [offset, num_bytes] : used) list.deallocate(offset);
  CHECK(list.blocks().size() == 1);
  CHECK(free_bytes(list) == kTotal);
}

TEST_CASE("the best fit is taken, where its alignment allows") {
  BlockList list(1000);
  const auto a = list.allocate(100, 1);
  const auto b = list.allocate(50, 1);
  const auto c = list.allocate(60, 1);
  const auto d = list.allocate(50, 1);
  list.deallocate(*c);
  CHECK(list.allocate(55, 1) == *c);
  CHECK(list.allocate(60, 256) == 512);
  list.deallocate(*a);
  CHECK(list.allocate(100, 1) == *a);
  CHECK_FALSE(list.allocate(1000, 1).has_value());
  CHECK(list.deallocate(*b) == 50);
  list.hold(*d + 49);
  list.hold(*d);
  CHECK(list.release(*d + 49) == 0);
  CHECK(list.deallocate(*d) == 0);
  CHECK(list.allocate(50, 1) != *d);
  CHECK(list.release(*d) == 50);
  list.hold(*a);
  CHECK(list.release(*a) == 0);  // it is in use
  CHECK(list.deallocate(*a) == 100);
}

TEST_CASE("a buffer is located by any of its bytes, and others are nowhere") {
  SharedArena& arena = SharedArena::instance();
  auto* small = static_cast<std::byte*>(arena.allocate(10));
  auto* large = static_cast<std::byte*>(arena.allocate(100'000));
  CHECK(reinterpret_cast<std::uintptr_t>(small) % 64 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(large) % 4096 == 0);
  const ArenaLocation there = arena.locate(large + 5000, 95'000);
  CHECK(there.is_somewhere());
  CHECK(arena.address_of(there) == large + 5000);
  CHECK_FALSE(arena.locate(large, std::size_t{1} << 50).is_somewhere());
  const std::vector<std::byte> other(100);
  CHECK_FALSE(arena.locate(other.data(), 100).is_somewhere());
  CHECK_FALSE(arena.locate(nullptr, 0).is_somewhere());
  arena.deallocate(small);
  arena.deallocate(large);
}

// Ends an interval. In the future, so that the helper's calls come too early to end any.
void end_interval(SharedArena& arena) {
  static SharedArena::Clock::time_point now = SharedArena::Clock::now();
  now += std::chrono::hours(1);
  arena.trim(now);
}

TEST_CASE("buffers freed and allocated a thousand times: nothing grows, and pages go back") {
  SharedArena& arena = SharedArena::instance();
  void* first = arena.allocate(96 * kMiB);
  arena.deallocate(first);
  const SharedArena::Usage before = arena.usage();
  for (int turn = 0; turn < 1000; ++turn) {
    std::vector<void*> blocks;
    for (const std::size_t num_bytes : {std::size_t{1}, std::size_t{4096}, 70 * kMiB, kMiB + 1})
      blocks.push_back(arena.allocate(num_bytes));
    std::memset(blocks[2], 1, 4096);
    for (void* block : blocks) arena.deallocate(block);
  }
  const SharedArena::Usage after = arena.usage();
  CHECK(after.num_blocks == before.num_blocks);
  CHECK(after.num_regions == before.num_regions);
  for (int turn = 0; turn < 2; ++turn) end_interval(arena);
  CHECK(arena.usage().kept_bytes == 0);
  // Returned pages are zero again.
  auto* block = static_cast<unsigned char*>(arena.allocate(70 * kMiB));
  CHECK(block[0] == 0);
  arena.deallocate(block);
}

TEST_CASE("memory that is used in every interval is kept, and returned after one without use") {
  SharedArena& arena = SharedArena::instance();
  // Several blocks and a gap, so that there are several free ranges, longer than one return.
  const auto fill = [&](unsigned char value) {
    std::vector<unsigned char*> blocks;
    for (const std::size_t num_bytes : {70 * kMiB, 5 * kMiB + 77, 40 * kMiB})
      blocks.push_back(static_cast<unsigned char*>(arena.allocate(num_bytes)));
    bool is_kept = true;
    for (unsigned char* block : blocks) {
      is_kept = is_kept && block[kMiB] == value - 1;
      for (std::size_t page = 0; page < 5 * kMiB; page += 4096) block[page] = value;
    }
    for (unsigned char* block : blocks) arena.deallocate(block);
    return is_kept;
  };
  fill(1);
  for (unsigned char turn = 2; turn < 6; ++turn) {
    end_interval(arena);
    CHECK(fill(turn));
  }
  for (int turn = 0; turn < 2; ++turn) end_interval(arena);
  CHECK(arena.usage().kept_bytes == 0);
  CHECK_FALSE(fill(6));
}

TEST_CASE("buffers beyond a region get another, and regions stay few") {
  SharedArena& arena = SharedArena::instance();
  std::vector<void*> blocks;
  for (int i = 0; i < 40; ++i) blocks.push_back(arena.allocate(100 * kMiB));
  const SharedArena::Usage usage = arena.usage();
  CHECK(usage.mapped_bytes >= 4000 * kMiB);
  CHECK(usage.num_regions <= 10);
  for (void* block : blocks) {
    CHECK(arena.locate(block, 100 * kMiB).is_somewhere());
    arena.deallocate(block);
  }
}

TEST_CASE("what the machine has not is refused by name and number") {
  try {
    SharedArena::instance().allocate(std::size_t{1} << 50);
    FAIL("allocated a pebibyte");
  } catch (const OutOfMemory& error) {
    CHECK(std::string(error.what()).find("(1048576 GiB) of shared memory") != std::string::npos);
  }
}

TEST_CASE("a block that is held is not handed out again") {
  SharedArena& arena = SharedArena::instance();
  const std::size_t num_blocks = arena.usage().num_blocks;
  bool is_over = false;
  auto* block = static_cast<std::byte*>(arena.allocate(5000));
  arena.hold(arena.locate(block + 100, 10), [&] { return is_over; });
  arena.hold({}, [] { return false; });
  arena.deallocate(block);
  for (int i = 0; i < 20; ++i) {
    auto* other = static_cast<std::byte*>(arena.allocate(5000));
    CHECK(other != block);
    arena.deallocate(other);
  }
  CHECK(arena.usage().num_blocks == num_blocks + 1);
  is_over = true;
  arena.deallocate(arena.allocate(5000));
  CHECK(arena.usage().num_blocks == num_blocks);
}

TEST_CASE("threads allocate and free at once") {
  testing::run_threads(4, [](int rank) {
    SharedArena& arena = SharedArena::instance();
    std::mt19937 random(static_cast<unsigned>(rank));
    std::vector<std::pair<std::uint64_t*, std::uint64_t>> mine;
    for (int turn = 0; turn < 2000; ++turn) {
      if (mine.size() < 20) {
        const std::uint64_t words = 1 + random() % 2000;
        auto* block = static_cast<std::uint64_t*>(arena.allocate(words * 8));
        block[0] = block[words - 1] = static_cast<std::uint64_t>(rank) << 32 | words;
        mine.emplace_back(block, words);
        continue;
      }
      const std::size_t victim = random() % mine.size();
      const auto [block, words] = mine[victim];
      const std::uint64_t mark = static_cast<std::uint64_t>(rank) << 32 | words;
      testing::expect(block[0] == mark && block[words - 1] == mark, "a block to itself");
      arena.deallocate(block);
      mine.erase(mine.begin() + static_cast<long>(victim));
    }
    for (const auto& [block, words] : mine) arena.deallocate(block);
  });
}

TEST_CASE("memory of a peer is mapped once, and that of a process that is no more is not found") {
  constexpr std::chrono::seconds kPatience{30};
  const PeerProcess ended(1, "here", "ringcomm-nobody");
  const auto nobody = ended.memory();
  CHECK(nobody == ended.memory());
  CHECK(nobody->find({.region_id = 1}, 10, kPatience) == nullptr);
  SharedArena& arena = SharedArena::instance();
  auto* block = static_cast<std::byte*>(arena.allocate(100));
  const ArenaLocation location = arena.locate(block, 100);
  const PeerProcess living(::getpid(), "here", Bootstrap::instance().address());
  const auto peer = living.memory();
  std::byte* there = peer->find(location, 100, kPatience);
  REQUIRE(there != nullptr);
  CHECK(there != block);
  CHECK(there == peer->find(location, 100, kPatience));
  block[99] = std::byte{42};
  CHECK(there[99] == std::byte{42});
  testing::expect_error(
      testing::error_of([&] { peer->find(location, std::size_t{1} << 50, kPatience); }),
      ErrorKind::kSystem, {"is not inside the memory"});
  CHECK(peer->find({.region_id = 1000}, 1, kPatience) == nullptr);
  arena.deallocate(block);
}

#ifndef __SANITIZE_THREAD__  // which forbids threads in a forked child
TEST_CASE("a forked child shares what it inherits, frees none of it, and has an arena of its own") {
  SharedArena& arena = SharedArena::instance();
  auto* block = static_cast<unsigned char*>(arena.allocate(80 * kMiB));
  std::memset(block, 7, 80 * kMiB);
  const auto uses_its_own = [&] {
    block[1] = 8;
    if (SharedArena::find() != nullptr) return 1;
    SharedArena::instance().deallocate(block);
    auto* own = static_cast<unsigned char*>(SharedArena::instance().allocate(80 * kMiB));
    if (SharedArena::instance().locate(block, 1).is_somewhere()) return 2;
    if (own >= block && own < block + 80 * kMiB) return 3;
    own[0] = 9;
    SharedArena::instance().deallocate(own);
    return 0;
  };
  CHECK(testing::status_of_child(uses_its_own) == 0);
  CHECK(block[0] == 7);
  CHECK(block[1] == 8);
  CHECK(block[80 * kMiB - 1] == 7);
  arena.deallocate(block);
}
#endif

}  // namespace
