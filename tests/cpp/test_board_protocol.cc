// Boards of 2 to 4 threads, on one buffer, so that ThreadSanitizer sees every access of all.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "core/board_protocol.h"
#include "host/host_arch.h"
#include "test_stop.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using testing::expect;
using Arch = host::HostArch;

constexpr int kMaxWorld = 4;
constexpr std::size_t kRegionBytes = 128;

struct BoardMemory {
  std::array<Cursor, 2 * kMaxWorld> cursors;
  alignas(64) std::array<std::byte, 2 * kMaxWorld * kRegionBytes> regions = {};

  BoardGeometry geometry(int world_size) {
    return {.world_size = world_size,
            .cursors = reinterpret_cast<std::byte*>(cursors.data()),
            .regions = regions.data(),
            .region_stride_bytes = kRegionBytes,
            .region_bytes = kRegionBytes};
  }
};

std::uint64_t word_of(int rank, std::uint64_t phase, std::size_t at) {
  return phase * 100'000 + static_cast<std::uint64_t>(rank) * 1000 + at;
}

void fill(std::byte* region, int rank, std::uint64_t phase) {
  for (std::size_t at = 0; at < kRegionBytes; at += 8) {
    const std::uint64_t word = word_of(rank, phase, at);
    std::memcpy(region + at, &word, sizeof(word));
  }
}

bool holds(const std::byte* region, int rank, std::uint64_t phase) {
  for (std::size_t at = 0; at < kRegionBytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, region + at, sizeof(word));
    if (word != word_of(rank, phase, at)) return false;
  }
  return true;
}

struct Plan {
  int world_size;
  std::uint64_t num_phases;
  bool is_parking;
  bool is_one_writer;  // only rank phase % world_size writes and is read
  int slow_rank;       // sleeps occasionally; -1: none
};

void run_rank(BoardMemory& memory, const Plan& plan, int rank) {
  testing::Patience patience;
  Arch arch(patience, 0);
  if (plan.is_parking) arch.budget() = SpinBudget::none();
  Board<Arch> board(arch, memory.geometry(plan.world_size), rank);
  for (std::uint64_t phase = 0; phase < plan.num_phases; ++phase) {
    const int writer = static_cast<int>(phase % static_cast<std::uint64_t>(plan.world_size));
    if (rank == plan.slow_rank && phase % 5 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (!plan.is_one_writer || rank == writer) {
      std::byte* region = nullptr;
      expect(board.open(region) == WaitStatus::kNone, "an open region");
      fill(region, rank, phase);
    }
    board.publish();
    for (int distance = 1; distance < plan.world_size; ++distance) {
      const int peer = (rank + distance) % plan.world_size;
      if (plan.is_one_writer && peer != writer) continue;
      const std::byte* region = nullptr;
      expect(board.wait(peer, region) == WaitStatus::kNone, "a published region");
      expect(holds(region, peer, phase),
             "what rank " + std::to_string(peer) + " wrote in phase " + std::to_string(phase));
    }
  }
}

void stress(const Plan& plan) {
  CAPTURE(plan.world_size);
  CAPTURE(plan.slow_rank);
  BoardMemory memory;
  testing::run_threads(plan.world_size, [&](int rank) { run_rank(memory, plan, rank); });
  for (int rank = 0; rank < plan.world_size; ++rank) {
    const BoardGeometry geometry = memory.geometry(plan.world_size);
    CHECK(geometry.cursor(0, rank, plan.num_phases - 1).value == plan.num_phases);
    for (const std::uint64_t phase : {0, 1}) CHECK(geometry.cursor(0, rank, phase).sleepers == 0);
  }
}

TEST_CASE("boards show every phase of every rank") {
  for (int world_size = 2; world_size <= kMaxWorld; ++world_size) {
    stress({world_size, 1000, false, false, -1});
    stress({world_size, 400, true, false, -1});
  }
}

TEST_CASE("boards wait for the slow rank, whichever it is") {
  for (int slow_rank = 0; slow_rank < 3; ++slow_rank) {
    stress({3, 300, true, false, slow_rank});
    stress({3, 300, false, false, slow_rank});
  }
}

TEST_CASE("boards on which one rank writes and the others only read") {
  for (int world_size = 2; world_size <= kMaxWorld; ++world_size) {
    stress({world_size, 600, false, true, -1});
    stress({world_size, 200, true, true, world_size - 1});
  }
}

TEST_CASE("a wait on a board names the rank that it waited for") {
  BoardMemory memory;
  testing::Refusal refusal(WaitStatus::kTimeout);
  Arch arch(refusal, 0);
  arch.budget() = SpinBudget::none();
  const BoardGeometry geometry = memory.geometry(3);
  Board<Arch> board(arch, geometry, 0);
  Board<Arch> prompt(arch, geometry, 1);
  std::byte* region = nullptr;
  CHECK(board.open(region) == WaitStatus::kNone);  // the first phase needs no peer
  board.publish();
  prompt.publish();
  const std::byte* received = nullptr;
  CHECK(board.wait(1, received) == WaitStatus::kNone);
  CHECK(board.wait(2, received) == WaitStatus::kTimeout);
  CHECK(refusal.last_peer() == 2);
  CHECK(board.open(region) == WaitStatus::kTimeout);
  CHECK(refusal.last_peer() == 2);
}

TEST_CASE("a rank that takes back its buffers waits for all readers") {
  BoardMemory memory;
  testing::Refusal refusal(WaitStatus::kTimeout);
  Arch arch(refusal, 0);
  arch.budget() = SpinBudget::none();
  const BoardGeometry geometry = memory.geometry(3);
  Board<Arch> lender(arch, geometry, 0);
  Board<Arch> reader(arch, geometry, 1);
  lender.publish();
  reader.publish();
  CHECK(reader.rejoin() == WaitStatus::kTimeout);  // it has begun the next phase
  CHECK(lender.rejoin() == WaitStatus::kTimeout);
  CHECK(refusal.last_peer() == 2);
  Board<Arch> late(arch, geometry, 2);
  late.publish();
  CHECK(late.rejoin() == WaitStatus::kNone);
}

// Negative control: a rank that fills without open() overwrites what a slow peer still reads.
TEST_CASE("a region filled too early is seen by this test") {
  BoardMemory memory;
  testing::Patience patience;
  Arch arch(patience, 0);
  const BoardGeometry geometry = memory.geometry(2);
  Board<Arch> hasty(arch, geometry, 0);
  for (std::uint64_t phase = 0; phase < 3; ++phase) {
    fill(geometry.region(0, phase), 0, phase);
    hasty.publish();
  }
  Board<Arch> late(arch, geometry, 1);
  late.publish();
  const std::byte* region = nullptr;
  CHECK(late.wait(0, region) == WaitStatus::kNone);
  CHECK_FALSE(holds(region, 0, 0));
}

}  // namespace
