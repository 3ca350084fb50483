// Links between two threads, and boards of 2 to 4, on one buffer, so that ThreadSanitizer sees
// every access of all.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "core/board_protocol.h"
#include "core/link_protocol.h"
#include "host/host_arch.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using testing::expect;
using Arch = host::HostArch;

constexpr std::size_t kPartBytes = 256;

// A slot of a link, and a region of a board: its number is in every word, so that a torn or stale
// one shows anywhere.
void fill(std::byte* part, std::uint64_t n) {
  for (std::size_t at = 0; at < kPartBytes; at += sizeof(n)) {
    const std::uint64_t word = n * 1000 + at;
    std::memcpy(part + at, &word, sizeof(word));
  }
}

bool holds(const std::byte* part, std::uint64_t n) {
  for (std::size_t at = 0; at < kPartBytes; at += sizeof(n)) {
    std::uint64_t word = 0;
    std::memcpy(&word, part + at, sizeof(word));
    if (word != n * 1000 + at) return false;
  }
  return true;
}

// ---- links

struct LinkMemory {
  LinkCursors cursors;
  alignas(64) std::byte slots[5 * kPartBytes] = {};

  LinkGeometry geometry(std::uint32_t num_slots) {
    return {.tail = &cursors.tail,
            .head = &cursors.head,
            .slots = slots,
            .num_slots = num_slots,
            .slot_bytes = kPartBytes};
  }
};

struct Pace {
  SpinBudget budget;
  bool is_trying;   // with try_acquire and try_wait where they succeed
  int sleep_every;  // messages between two naps; 0: none
};

void nap(const Pace& pace, std::uint64_t n) {
  if (pace.sleep_every > 0 && n % static_cast<std::uint64_t>(pace.sleep_every) == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void send_all(LinkMemory& memory, std::uint32_t num_slots, std::uint64_t num_messages, Pace pace) {
  testing::Patience patience;
  Arch arch(patience, 0);
  arch.budget() = pace.budget;
  SendLink<Arch> link(arch, memory.geometry(num_slots), 1);
  for (std::uint64_t n = 0; n < num_messages; ++n) {
    nap(pace, n);
    std::byte* slot = nullptr;
    if (!pace.is_trying || !link.try_acquire(slot))
      expect(link.acquire(slot) == WaitStatus::kNone, "a free slot");
    fill(slot, n);
    link.publish();
  }
  expect(link.wait_drained(0) == WaitStatus::kNone, "a drained link");
}

void recv_all(LinkMemory& memory, std::uint32_t num_slots, std::uint64_t num_messages, Pace pace) {
  testing::Patience patience;
  Arch arch(patience, 0);
  arch.budget() = pace.budget;
  RecvLink<Arch> link(arch, memory.geometry(num_slots), 0);
  for (std::uint64_t n = 0; n < num_messages; ++n) {
    const std::byte* slot = nullptr;
    if (!pace.is_trying || !link.try_wait(slot))
      expect(link.wait(slot) == WaitStatus::kNone, "a filled slot");
    expect(holds(slot, n), "message " + std::to_string(n) + " complete and in order");
    link.release();
    nap(pace, n);
  }
}

void stress_link(std::uint32_t num_slots, std::uint64_t num_messages, const Pace& sender,
                 const Pace& receiver) {
  LinkMemory memory;
  testing::run_threads(2, [&](int rank) {
    if (rank == 0)
      send_all(memory, num_slots, num_messages, sender);
    else
      recv_all(memory, num_slots, num_messages, receiver);
  });
  CHECK(memory.cursors.tail.value == num_messages);
  CHECK(memory.cursors.head.value == num_messages);
  CHECK(memory.cursors.tail.sleepers == 0);
  CHECK(memory.cursors.head.sleepers == 0);
}

TEST_CASE("a link delivers complete messages in order, spinning") {
  for (std::uint32_t num_slots = 2; num_slots <= 5; ++num_slots)
    stress_link(num_slots, 4000, {{}, false, 0}, {{}, false, 0});
}

TEST_CASE("a link delivers complete messages in order, sleeping at every wait") {
  for (std::uint32_t num_slots = 2; num_slots <= 5; ++num_slots)
    stress_link(num_slots, 1500, {SpinBudget::none(), false, 0}, {SpinBudget::none(), false, 0});
}

TEST_CASE("a link with a slow end, and one that does not wait") {
  stress_link(2, 500, {SpinBudget::none(), true, 0}, {SpinBudget::none(), false, 7});
  stress_link(3, 500, {SpinBudget::none(), false, 5}, {{}, true, 0});
  stress_link(4, 2000, {{}, true, 0}, {{}, true, 0});
}

TEST_CASE("try_acquire and try_wait say no where acquire and wait would sleep") {
  LinkMemory memory;
  testing::Patience patience;
  Arch arch(patience, 0);
  SendLink<Arch> to(arch, memory.geometry(2), 1);
  RecvLink<Arch> from(arch, memory.geometry(2), 0);
  std::byte* slot = nullptr;
  const std::byte* received = nullptr;
  CHECK_FALSE(from.try_wait(received));
  for (std::uint64_t n = 0; n < 2; ++n) {
    REQUIRE(to.try_acquire(slot));
    fill(slot, n);
    to.publish();
  }
  CHECK_FALSE(to.try_acquire(slot));
  REQUIRE(from.try_wait(received));
  CHECK(holds(received, 0));
  CHECK_FALSE(to.try_acquire(slot));  // read, but not released
  from.release();
  CHECK(to.try_acquire(slot));
  REQUIRE(from.try_wait(received));
  CHECK(holds(received, 1));
}

TEST_CASE("a wait on a link ends with the reason to stop") {
  LinkMemory memory;
  testing::Refusal refusal(WaitStatus::kPeerDied);
  Arch arch(refusal, 0);
  arch.budget() = SpinBudget::none();
  SendLink<Arch> to(arch, memory.geometry(2), 1);
  RecvLink<Arch> from(arch, memory.geometry(2), 0);
  const std::byte* received = nullptr;
  std::byte* slot = nullptr;
  CHECK(from.wait(received) == WaitStatus::kPeerDied);
  for (int n = 0; n < 2; ++n) {
    CHECK(to.acquire(slot) == WaitStatus::kNone);
    to.publish();
  }
  CHECK(to.acquire(slot) == WaitStatus::kPeerDied);
  CHECK(to.wait_drained(0) == WaitStatus::kPeerDied);
  // The slot that a peer published before it died can still be read.
  CHECK(from.wait(received) == WaitStatus::kNone);
}

TEST_CASE("ends made anew go on where the old ones were, with another geometry once drained") {
  LinkMemory memory;
  for (const std::uint32_t num_slots : {2U, 5U, 3U, 4U}) {
    const std::uint64_t sent_before = memory.cursors.tail.value;
    testing::run_threads(2, [&](int rank) {
      if (rank == 0)
        send_all(memory, num_slots, 101, {SpinBudget::none(), false, 0});
      else
        recv_all(memory, num_slots, 101, {{}, false, 0});
    });
    CHECK(memory.cursors.tail.value == sent_before + 101);
  }
}

// Looks at the link while a step copies out of it.
struct WatchfulArch : Arch {
  WatchfulArch(testing::Patience& patience, const LinkCursors& cursors)
      : Arch(patience, 0), cursors_(cursors) {}
  void copy(void* to, const void* from, std::size_t num_bytes) {
    num_copies += 1;
    has_slot = has_slot && cursors_.head.value + 1 == cursors_.tail.value;
    Arch::copy(to, from, num_bytes);
  }
  int num_copies = 0;
  bool has_slot = true;

 private:
  const LinkCursors& cursors_;
};

TEST_CASE("a step of a ring returns a slot when it has copied all of it") {
  LinkMemory memory, next;
  testing::Patience patience;
  WatchfulArch arch(patience, memory.cursors);
  SendLink<WatchfulArch> to(arch, memory.geometry(2), 1), on(arch, next.geometry(2), 1);
  RecvLink<WatchfulArch> from(arch, memory.geometry(2), 0);
  std::byte output[kPartBytes] = {};
  for (std::uint64_t n = 0; n < 2; ++n) {
    std::byte* slot = nullptr;
    REQUIRE(to.try_acquire(slot));
    fill(slot, n);
    to.publish();
    const WaitStatus stop = n == 0 ? recv(arch, from, output, kPartBytes)
                                   : recv_copy_send(arch, from, on, output, kPartBytes);
    CHECK(stop == WaitStatus::kNone);
    CHECK(holds(output, n));
    CHECK(memory.cursors.head.value == n + 1);
  }
  CHECK(holds(next.slots, 1));
  CHECK(arch.num_copies == 3);
  CHECK(arch.has_slot);
}

// Negative control: with ends that disagree on the number of slots the check must speak up.
TEST_CASE("ends of different geometry are seen by this test") {
  LinkMemory memory;
  testing::Patience patience;
  Arch arch(patience, 0);
  SendLink<Arch> to(arch, memory.geometry(3), 1);
  RecvLink<Arch> from(arch, memory.geometry(2), 0);
  bool is_seen = false;
  for (std::uint64_t n = 0; n < 3; ++n) {
    std::byte* slot = nullptr;
    const std::byte* received = nullptr;
    REQUIRE(to.try_acquire(slot));
    fill(slot, n);
    to.publish();
    REQUIRE(from.try_wait(received));
    is_seen |= !holds(received, n);
    from.release();
  }
  CHECK(is_seen);
}

// ---- boards

constexpr int kMaxWorld = 4;

struct BoardMemory {
  std::array<Cursor, 2 * kMaxWorld> cursors;
  alignas(64) std::array<std::byte, 2 * kMaxWorld * kPartBytes> regions = {};

  BoardGeometry geometry(int world_size) {
    return {.world_size = world_size,
            .cursors = reinterpret_cast<std::byte*>(cursors.data()),
            .regions = regions.data(),
            .region_stride_bytes = kPartBytes,
            .region_bytes = kPartBytes};
  }
};

// Of what a rank writes in a phase.
std::uint64_t number_of(int rank, std::uint64_t phase) {
  return phase * 100 + static_cast<std::uint64_t>(rank);
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
      fill(region, number_of(rank, phase));
    }
    board.publish();
    for (int distance = 1; distance < plan.world_size; ++distance) {
      const int peer = (rank + distance) % plan.world_size;
      if (plan.is_one_writer && peer != writer) continue;
      const std::byte* region = nullptr;
      expect(board.wait(peer, region) == WaitStatus::kNone, "a published region");
      expect(holds(region, number_of(peer, phase)),
             "what rank " + std::to_string(peer) + " wrote in phase " + std::to_string(phase));
    }
  }
}

void stress_board(const Plan& plan) {
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
    stress_board({world_size, 1000, false, false, -1});
    stress_board({world_size, 400, true, false, -1});
  }
}

TEST_CASE("boards wait for the slow rank, whichever it is") {
  for (int slow_rank = 0; slow_rank < 3; ++slow_rank) {
    stress_board({3, 300, true, false, slow_rank});
    stress_board({3, 300, false, false, slow_rank});
  }
}

TEST_CASE("boards on which one rank writes and the others only read") {
  for (int world_size = 2; world_size <= kMaxWorld; ++world_size) {
    stress_board({world_size, 600, false, true, -1});
    stress_board({world_size, 200, true, true, world_size - 1});
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
    fill(geometry.region(0, phase), number_of(0, phase));
    hasty.publish();
  }
  Board<Arch> late(arch, geometry, 1);
  late.publish();
  const std::byte* region = nullptr;
  CHECK(late.wait(0, region) == WaitStatus::kNone);
  CHECK_FALSE(holds(region, number_of(0, 0)));
}

}  // namespace
