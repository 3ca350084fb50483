// Memory that peers can map: allocation of blocks, pages returned to the system, and forked
// children.
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "children.h"
#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/shared_arena.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::host;

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
