// Links between two threads, on one buffer, so that ThreadSanitizer sees every access of both.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

#include "core/link_protocol.h"
#include "host/host_arch.h"
#include "test_stop.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using testing::expect;
using Arch = host::HostArch;

constexpr std::size_t kSlotBytes = 256;

struct LinkMemory {
  LinkCursors cursors;
  alignas(64) std::byte slots[5 * kSlotBytes] = {};

  LinkGeometry geometry(std::uint32_t num_slots) {
    return {.tail = &cursors.tail,
            .head = &cursors.head,
            .slots = slots,
            .num_slots = num_slots,
            .slot_bytes = kSlotBytes};
  }
};

// Message n: its number in every word, so that a torn or stale one shows anywhere.
void fill(std::byte* slot, std::uint64_t n) {
  for (std::size_t at = 0; at < kSlotBytes; at += sizeof(n)) {
    const std::uint64_t word = n * 1000 + at;
    std::memcpy(slot + at, &word, sizeof(word));
  }
}

bool holds(const std::byte* slot, std::uint64_t n) {
  for (std::size_t at = 0; at < kSlotBytes; at += sizeof(n)) {
    std::uint64_t word = 0;
    std::memcpy(&word, slot + at, sizeof(word));
    if (word != n * 1000 + at) return false;
  }
  return true;
}

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

void stress(std::uint32_t num_slots, std::uint64_t num_messages, const Pace& sender,
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
    stress(num_slots, 4000, {{}, false, 0}, {{}, false, 0});
}

TEST_CASE("a link delivers complete messages in order, sleeping at every wait") {
  for (std::uint32_t num_slots = 2; num_slots <= 5; ++num_slots)
    stress(num_slots, 1500, {SpinBudget::none(), false, 0}, {SpinBudget::none(), false, 0});
}

TEST_CASE("a link with a slow end, and one that does not wait") {
  stress(2, 500, {SpinBudget::none(), true, 0}, {SpinBudget::none(), false, 7});
  stress(3, 500, {SpinBudget::none(), false, 5}, {{}, true, 0});
  stress(4, 2000, {{}, true, 0}, {{}, true, 0});
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
  std::byte output[kSlotBytes] = {};
  for (std::uint64_t n = 0; n < 2; ++n) {
    std::byte* slot = nullptr;
    REQUIRE(to.try_acquire(slot));
    fill(slot, n);
    to.publish();
    const WaitStatus stop = n == 0 ? recv(arch, from, output, kSlotBytes)
                                   : recv_copy_send(arch, from, on, output, kSlotBytes);
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

}  // namespace
