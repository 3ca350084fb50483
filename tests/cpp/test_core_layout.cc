// The arithmetic of core: schedules and offsets. The compiler checks most of it.
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/chunk_layout.h"
#include "core/packet_protocol.h"
#include "core/wait_policy.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;

constexpr int kMaxWorld = 64;

// A rank receives at each step what the previous rank sends, and sends it at the next step.
constexpr bool is_chained(int world) {
  for (int rank = 0; rank < world; ++rank) {
    const RingSchedule mine(rank, world);
    const RingSchedule previous(mine.previous(), world);
    if (previous.next() != rank || mine.num_steps() != world - 1) return false;
    for (int step = 0; step < mine.num_steps(); ++step) {
      const int reduced = mine.reduce_scatter_recv_chunk(step);
      const int gathered = mine.all_gather_recv_chunk(step);
      if (reduced != previous.reduce_scatter_send_chunk(step)) return false;
      if (gathered != previous.all_gather_send_chunk(step)) return false;
      if (step + 1 == mine.num_steps()) continue;
      if (reduced != mine.reduce_scatter_send_chunk(step + 1)) return false;
      if (gathered != mine.all_gather_send_chunk(step + 1)) return false;
    }
    // The all-gather starts with the chunk that the reduce-scatter ends with: the rank's own.
    if (world > 1 && (mine.reduce_scatter_recv_chunk(world - 2) != rank ||
                      mine.all_gather_send_chunk(0) != rank))
      return false;
  }
  return true;
}

// Plays the ring with sets of contributors: bit r of parts[rank][chunk] means that rank r's shard
// of the chunk is included. Each shard is added once, and in the end every rank has all complete
// chunks. So no rank has a chunk twice: the steps are as many as must be.
constexpr bool is_complete(int world) {
  std::array<std::array<std::uint64_t, kMaxWorld>, kMaxWorld> parts{};
  const std::uint64_t all =
      world == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << world) - std::uint64_t{1};
  for (int rank = 0; rank < world; ++rank)
    for (int chunk = 0; chunk < world; ++chunk) parts[rank][chunk] = std::uint64_t{1} << rank;
  for (int step = 0; step + 1 < world; ++step) {
    const auto before = parts;
    for (int rank = 0; rank < world; ++rank) {
      const RingSchedule mine(rank, world);
      const int chunk = mine.reduce_scatter_recv_chunk(step);
      const std::uint64_t received = before[mine.previous()][chunk];
      if ((received & parts[rank][chunk]) != 0) return false;  // a shard would count twice
      parts[rank][chunk] |= received;
    }
  }
  for (int rank = 0; rank < world; ++rank)
    if (parts[rank][rank] != all) return false;
  for (int step = 0; step + 1 < world; ++step) {
    const auto before = parts;
    for (int rank = 0; rank < world; ++rank) {
      const RingSchedule mine(rank, world);
      const int chunk = mine.all_gather_recv_chunk(step);
      if (before[mine.previous()][chunk] != all || parts[rank][chunk] == all) return false;
      parts[rank][chunk] = all;
    }
  }
  for (int rank = 0; rank < world; ++rank)
    for (int chunk = 0; chunk < world; ++chunk)
      if (parts[rank][chunk] != all) return false;
  return true;
}

TEST_CASE("a packet is there when both of its words have the call's flag") {
  const auto word = [](std::uint64_t data, std::uint64_t flag) { return data | flag << 32; };
  std::uint64_t data = 7;
  CHECK_FALSE(open_packet(word(1, 4), word(2, 5), 5, data));
  CHECK_FALSE(open_packet(word(1, 5), word(2, 4), 5, data));
  CHECK(data == 7);
  CHECK(open_packet(word(1, 5), word(2, 5), 5, data));
  CHECK(data == word(1, 2));
}

TEST_CASE("ring schedule of every world up to 64") {
  for (int world = 1; world <= kMaxWorld; ++world) {
    CAPTURE(world);
    CHECK(is_chained(world));
    CHECK(is_complete(world));
  }
}

// Chunks are contiguous, cover everything, and differ by at most one; the longer ones come first.
constexpr bool is_partition(std::size_t num_elems, int num_chunks) {
  const ChunkLayout layout(num_elems, num_chunks);
  std::size_t end_elems = 0;
  const std::size_t longest = layout.max_chunk_elems();
  for (int idx = 0; idx < num_chunks; ++idx) {
    const ElemRange chunk = layout.chunk(idx);
    if (chunk.begin_elems != end_elems) return false;
    if (chunk.num_elems > longest || chunk.num_elems + 1 < longest) return false;
    if (idx > 0 && chunk.num_elems > layout.chunk(idx - 1).num_elems) return false;
    end_elems = chunk.end_elems();
  }
  return end_elems == num_elems && layout.chunk(0).num_elems == longest;
}

static_assert(ChunkLayout(3, 4).chunk(3) == ElemRange{3, 0});
static_assert(ChunkLayout(10, 4).chunk(1) == ElemRange{3, 3});
static_assert(ChunkLayout(10, 4).chunk(2) == ElemRange{6, 2});
static_assert(is_partition((std::size_t{1} << 31) + 5, 8));
static_assert(is_partition((std::size_t{1} << 40) + 7, 64));
static_assert(is_partition(std::numeric_limits<std::size_t>::max() / 64, 64));

TEST_CASE("chunks cover every count in order") {
  for (int num_chunks = 1; num_chunks <= 64; ++num_chunks) {
    for (std::size_t num_elems = 0; num_elems <= 200; ++num_elems) {
      if (is_partition(num_elems, num_chunks)) continue;
      FAIL_CHECK(num_elems << " elements in " << num_chunks << " chunks");
    }
  }
}

static_assert(num_slices(0, 16) == 0);
static_assert(num_slices(1, 16) == 1);
static_assert(num_slices(16, 16) == 1);
static_assert(num_slices(17, 16) == 2);
static_assert(slice_of({100, 20}, 0, 16) == ElemRange{100, 16});
static_assert(slice_of({100, 20}, 1, 16) == ElemRange{116, 4});
static_assert(slice_of({100, 20}, 2, 16) == ElemRange{120, 0});
static_assert(slice_of({100, 0}, 0, 16) == ElemRange{100, 0});
static_assert(slice_of({5, std::size_t{3} << 31}, 2, std::size_t{1} << 31) ==
              ElemRange{5 + (std::size_t{2} << 31), std::size_t{1} << 31});

TEST_CASE("slices cover a range in order, and are empty past it") {
  for (std::size_t max_elems = 1; max_elems <= 9; ++max_elems) {
    for (std::size_t num_elems = 0; num_elems <= 40; ++num_elems) {
      const ElemRange range{7, num_elems};
      std::size_t end_elems = range.begin_elems;
      const std::size_t count = num_slices(num_elems, max_elems);
      for (std::size_t idx = 0; idx < count; ++idx) {
        const ElemRange slice = slice_of(range, idx, max_elems);
        CHECK(slice.begin_elems == end_elems);
        CHECK(slice.num_elems > 0);
        CHECK(slice.num_elems <= max_elems);
        end_elems = slice.end_elems();
      }
      CHECK(end_elems == range.end_elems());
      CHECK(slice_of(range, count, max_elems).num_elems == 0);
      CHECK(slice_of(range, count + 3, max_elems).num_elems == 0);
    }
  }
}

constexpr std::uint32_t pauses_after(int num_hits, int num_misses) {
  SpinBudget budget;
  for (int i = 0; i < num_hits; ++i) budget.hit();
  for (int i = 0; i < num_misses; ++i) budget.miss(false, false);
  return budget.num_pauses();
}

static_assert(pauses_after(1000, 0) == SpinBudget::kMaxPauses);
static_assert(pauses_after(0, 1000) == SpinBudget::kMinPauses);
static_assert(pauses_after(1, 0) > pauses_after(0, 0));
static_assert(pauses_after(0, 1) == pauses_after(0, 0) / 2);

// Of `from`, as every rank sees it, by the sizes one by one and in constant time.
void check_even_shards(int world_size, int from, int begin, int end, std::size_t elems) {
  constexpr std::size_t kRoomElems = 100;
  for (int rank = 0; rank < world_size; ++rank) {
    std::array<ShardLayout::Sender, 9> one_by_one{};
    std::array<ShardLayout::Sender, 9> at_once{};
    const auto layout_of = [&](auto& senders) {
      return ShardLayout{ShardLayout::Kind::kToEach, rank, world_size, kRoomElems, senders.data()};
    };
    layout_of(one_by_one).learn(from, [&](int to) {
      return begin <= to && to < end ? elems : std::size_t{0};
    });
    layout_of(at_once).learn_even(from, begin, end, elems);
    const ShardLayout::Sender& expected = one_by_one.at(static_cast<std::size_t>(from));
    const ShardLayout::Sender& found = at_once.at(static_cast<std::size_t>(from));
    CHECK(found.num_pieces == expected.num_pieces);
    CHECK(found.elems == expected.elems);
    if (rank != from && found.elems > 0) CHECK(found.offset_elems == expected.offset_elems);
  }
}

TEST_CASE("equal shards have the layout in constant time that uneven ones have") {
  for (int world_size = 1; world_size <= 9; ++world_size)
    for (int from = 0; from < world_size; ++from)
      for (const std::size_t elems : {0, 1, 7, 12, 13, 50, 99, 100, 101, 1000}) {
        CAPTURE(world_size);
        CAPTURE(from);
        CAPTURE(elems);
        check_even_shards(world_size, from, 0, world_size, elems);  // all_to_all, scatter's root
        check_even_shards(world_size, from, 0, 0, elems);           // scatter's others
        for (int root = 0; root < world_size; ++root)
          check_even_shards(world_size, from, root, root + 1, elems);  // gather
      }
}

// A slice keeps its place when shorter shards before it have ended.
TEST_CASE("slices of uneven shards fit into a region, and apart from each other, in every piece") {
  constexpr int kNumRanks = 5;
  constexpr std::size_t kRoomElems = 64;
  for (const auto kind : {ShardLayout::Kind::kToEach, ShardLayout::Kind::kReduced})
    for (std::size_t salt = 0; salt < 200; ++salt) {
      const auto elems_of = [&](int to) {
        const std::size_t mixed = (salt + 3) * (static_cast<std::size_t>(to) + 7) * 2654435761U;
        return (mixed >> 7) % (salt % 2 == 0 ? 20 : 400);
      };
      const int from = static_cast<int>(salt) % kNumRanks;
      std::array<std::size_t, kNumRanks> covered{};
      std::size_t num_pieces = 1;
      for (std::size_t piece = 0; piece < num_pieces; ++piece) {
        std::size_t end_elems = 0;
        for (int rank = 0; rank < kNumRanks; ++rank) {
          if (rank == from) continue;
          std::array<ShardLayout::Sender, kNumRanks> senders{};
          const ShardLayout layout{kind, rank, kNumRanks, kRoomElems, senders.data()};
          layout.learn(from, elems_of);
          const ShardLayout::Sender& sender = senders.at(static_cast<std::size_t>(from));
          num_pieces = sender.num_pieces;
          const ElemRange part = layout.slice(from, sender.elems, piece);
          CHECK(sender.offset_elems >= end_elems);
          end_elems = sender.offset_elems + part.num_elems;
          CHECK(end_elems <= kRoomElems);
          if (part.num_elems > 0)
            CHECK(part.begin_elems == covered.at(static_cast<std::size_t>(rank)));
          covered.at(static_cast<std::size_t>(rank)) += part.num_elems;
        }
      }
      for (int rank = 0; rank < kNumRanks; ++rank)
        if (rank != from) CHECK(covered.at(static_cast<std::size_t>(rank)) == elems_of(rank));
    }
}

TEST_CASE("a spin budget recovers from its minimum and its maximum") {
  SpinBudget budget;
  for (int i = 0; i < 100; ++i) budget.miss(false, true);
  CHECK(budget.num_pauses() == SpinBudget::kMinPauses);
  budget.hit();
  CHECK(budget.num_pauses() > SpinBudget::kMinPauses);
  for (int i = 0; i < 1000; ++i) budget.hit();
  CHECK(budget.num_pauses() == SpinBudget::kMaxPauses);
  CHECK(budget.take_yields() == SpinBudget::kMaxYields);

  SpinBudget none = SpinBudget::none();
  none.hit();
  none.miss(true, true);
  CHECK(none.take_yields() == 0);
  CHECK(none.num_pauses() == 0);
}

TEST_CASE("a spin budget on an idle core grows to the waits that it just missed") {
  SpinBudget budget;
  for (int i = 0; i < 1000; ++i) budget.miss(true, false);  // longer than spinning and yielding
  const std::uint32_t idle_pauses = budget.num_pauses();
  CHECK(idle_pauses >= SpinBudget::kIdlePauses / 2);
  CHECK(idle_pauses <= SpinBudget::kIdlePauses * 9 / 8 + 1);
  for (int i = 0; i < 1000; ++i) budget.miss(true, true);
  CHECK(budget.num_pauses() == SpinBudget::kMaxPauses);
  budget.miss(false, true);  // another thread had the core
  CHECK(budget.num_pauses() == SpinBudget::kMaxPauses / 2);
}

std::uint32_t waits_without_yield(SpinBudget& budget) {
  budget.yield_was_long();
  std::uint32_t num_waits = 0;
  while (budget.take_yields() == 0) ++num_waits;
  return num_waits;
}

TEST_CASE("after a long yield, waits do not yield for a while, and longer after each further one") {
  SpinBudget budget;
  const auto yield_in_waits = [&](std::uint32_t num) {
    for (std::uint32_t i = 0; i < num; ++i) CHECK(budget.take_yields() == SpinBudget::kMaxYields);
  };
  yield_in_waits(1);
  std::uint32_t num = SpinBudget::kFewestWithoutYield;
  for (; num < SpinBudget::kMostWithoutYield; num *= 2) CHECK(waits_without_yield(budget) == num);
  for (int i = 0; i < 2; ++i) CHECK(waits_without_yield(budget) == SpinBudget::kMostWithoutYield);
  // waits_without_yield() has taken one yield already.
  yield_in_waits(SpinBudget::kYieldsForgiven - 2);
  CHECK(waits_without_yield(budget) == SpinBudget::kMostWithoutYield);
  yield_in_waits(2 * SpinBudget::kYieldsForgiven);
  CHECK(waits_without_yield(budget) == SpinBudget::kMostWithoutYield / 2);
  yield_in_waits(20 * SpinBudget::kYieldsForgiven);
  CHECK(waits_without_yield(budget) == SpinBudget::kFewestWithoutYield);
}

}  // namespace
