// What a rank counts of its peers: waits, late arrivals, bytes.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective_case.h"
#include "collectives/recorder.h"
#include "hosts_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using testing::expect;

constexpr int kNumCalls = 10;
constexpr std::size_t kNumElems = 100;
constexpr std::chrono::milliseconds kDelay{20};

void all_reduce(Communicator& communicator) {
  testing::run_case(communicator, {.num_elems = kNumElems});
}

std::vector<recorder::PeerCounts> counts_of(Communicator& communicator) {
  return communicator.log()->counts();
}

// The last rank comes late to each call, while another thread reads the counters.
void run_with_straggler(Communicator& communicator) {
  std::vector<std::uint64_t> numbers;
  for (int rank = 0; rank < communicator.world_size(); ++rank)
    numbers.push_back(static_cast<std::uint64_t>(rank));
  communicator.record_as("a test", numbers);
  const bool is_late = communicator.rank() == communicator.world_size() - 1;
  std::atomic<bool> is_over = false;
  std::thread reader([&] {
    while (!is_over) {
      static_cast<void>(counts_of(communicator));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int i = 0; i < kNumCalls; ++i) {
    if (is_late) std::this_thread::sleep_for(kDelay);
    all_reduce(communicator);
  }
  is_over = true;
  reader.join();
}

TEST_CASE("peer counts: a rank that comes late is named by all others") {
  testing::run_ranks(3, [](Communicator& communicator) {
    run_with_straggler(communicator);
    const auto counts = counts_of(communicator);
    const recorder::PeerCounts& late = counts[2];
    if (communicator.rank() == 2) return;
    expect(late.num_late > kNumCalls / 2 && late.num_late <= kNumCalls, "late calls");
    expect(late.num_waits >= late.num_late, "waits");
    expect(late.waited_ns > kNumCalls / 2 * 15'000'000ULL, "the time of the waits");
    for (const recorder::PeerCounts& each : counts)
      expect(each.sent_bytes + each.received_bytes == 0, "no messages");
  });
}

TEST_CASE("peer counts: over messages with their bytes, and on two hosts") {
  for (const std::string placement : {"abc", "aab", "abb"}) {
    testing::run_placed(placement, [&](Communicator& communicator) {
      run_with_straggler(communicator);
      const auto counts = counts_of(communicator);
      const int rank = communicator.rank();
      constexpr std::uint64_t kBytes = kNumCalls * kNumElems * sizeof(float);
      // Rank 0 is the other host's leader. It sees the last rank, or the leader that waits for it.
      if (rank == 0 && placement != "abb") expect(counts[2].num_late > kNumCalls / 2, "late calls");
      std::uint64_t sent = 0;
      std::uint64_t received = 0;
      for (const recorder::PeerCounts& each : counts) {
        sent += each.sent_bytes;
        received += each.received_bytes;
      }
      const auto place = static_cast<std::size_t>(rank);
      const bool has_messages = placement == "abc" || placement.find(placement[place]) == place;
      expect(sent == received, "as many bytes in as out");
      expect(sent == (placement == "abc" ? 2 * kBytes : has_messages ? kBytes : 0), "its bytes");
    });
  }
}

TEST_CASE("peer counts: counters that differ between sockets make no wait") {
  const auto ticks_of = [](double ns) { return static_cast<std::uint64_t>(ns / ns_per_tick); };
  CHECK(long_wait_ns(-std::uint64_t{5}) == 0);
  CHECK(long_wait_ns(ticks_of(kLongWait_ns / 2)) == 0);
  CHECK(long_wait_ns(ticks_of(2 * kLongWait_ns)) > kLongWait_ns);
}

TEST_CASE("peer counts: a group for which there is no place records nothing, and of two one") {
  testing::run_ranks(2, [](Communicator& communicator) {
    communicator.record_as("a test", {0, 1});
    testing::barrier(communicator);  // the ranks are threads: the other one's group needs a place
    if (communicator.rank() != 0) return testing::barrier(communicator);
    const GroupState& members = *communicator.group_state();
    const auto make = [&] {
      return recorder::Log::make("another test", 0, {0, 1}, "shm", members, false);
    };
    std::vector<std::unique_ptr<recorder::Log>> logs;
    while (logs.empty() || logs.back() != nullptr) {
      logs.push_back(make());
      expect(logs.size() <= recorder::kNumGroups, "no more groups than places");
    }
    logs.pop_back();
    for (int i = 0; i < 200; ++i) {  // two groups are made at once, for the place of one that ends
      logs.pop_back();
      std::array<std::unique_ptr<recorder::Log>, 2> made;
      std::atomic<int> num_ready = 0;
      const auto make_at_once = [&](std::size_t place) {
        ++num_ready;
        while (num_ready < 2) std::this_thread::yield();
        made[place] = make();
      };
      std::thread other(make_at_once, 1);
      make_at_once(0);
      other.join();
      expect((made[0] == nullptr) != (made[1] == nullptr), "one place for two groups");
      logs.push_back(std::move(made[made[0] == nullptr ? 1 : 0]));
    }
    testing::barrier(communicator);
  });
}

TEST_CASE("peer counts: nobody is late where nobody waits long") {
  testing::run_ranks(2, [](Communicator& communicator) {
    communicator.record_as("a test", {0, 1});
    for (int i = 0; i < 100; ++i) all_reduce(communicator);
    for (const recorder::PeerCounts& each : counts_of(communicator))
      expect(each.num_late <= each.num_waits && each.num_late < 80, "few late calls");
  });
}

}  // namespace
