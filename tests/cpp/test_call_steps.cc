// The steps in which ranks wait, as the flight recorder has them, while one rank stands still
// inside a ring.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "collective_case.h"
#include "collectives/recorder.h"
#include "host/wait.h"
#include "hosts_ranks.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using testing::expect;

constexpr int kWorldSize = 4;
constexpr int kNumSteps = 2 * (kWorldSize - 1);

struct Wait {
  int step, num_steps, waits_for;
  bool operator==(const Wait&) const = default;
};

// Where the ranks of group `name` wait, as a process from outside reads it.
std::array<Wait, kWorldSize> waits_of(const recorder::Memory& memory, const std::string& name) {
  std::array<Wait, kWorldSize> found{};
  for (std::size_t i = 0; i < recorder::kNumEvents; ++i) {
    const std::optional<recorder::Event> event = recorder::read(memory.event(i));
    if (!event) continue;
    const recorder::GroupEntry& group = memory.group(event->group);
    if (group.name != name) continue;
    found[static_cast<std::size_t>(group.rank)] = {event->step.step, event->step.num_steps,
                                                   event->waits_for};
  }
  return found;
}

// Rank 0 stands still in its call, after `is_still`, until the others wait as expected.
class Scene {
 public:
  Scene(std::string name, std::array<Wait, kWorldSize - 1> expected)
      : name_(std::move(name)), expected_(expected) {}

  // In the thread of rank 0. All ranks have been recorded.
  void stand_still() {
    const host::SharedMemory mapped(recorder::descriptor(), recorder::Memory::kNumBytes);
    const recorder::Memory memory(mapped.data());
    const auto deadline = std::chrono::steady_clock::now() + testing::kBound / 2;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      const auto waits = waits_of(memory, name_);
      if (std::equal(expected_.begin(), expected_.end(), waits.begin() + 1)) break;
      std::string said = "the waits of ranks 1 to 3";
      for (const Wait& wait : waits)
        said += ", step " + std::to_string(wait.step) + "/" + std::to_string(wait.num_steps) +
                " for rank " + std::to_string(wait.waits_for);
      expect(std::chrono::steady_clock::now() < deadline, said);
    }
    has_stood_ = true;
  }

  void run(
      Communicator& communicator, const WaitLimits& limits,
      const std::function<void()>& before = [] {}) {
    communicator.record_as(name_, {0, 1, 2, 3});
    testing::barrier(communicator);  // all are recorded
    before();
    testing::run_case(communicator, {.algorithm = Algorithm::kRing, .num_elems = 400}, limits);
    expect(has_stood_, "rank 0 stood still");
  }

 private:
  std::string name_;
  std::array<Wait, kWorldSize - 1> expected_;
  std::atomic<bool> has_stood_ = false;
};

TEST_CASE("call steps: a rank that 16 bits do not hold is nobody") {
  for (const int rank : {-2, -1, 0, 1, 32767}) CHECK(recorder::rank16(rank) == rank);
  for (const int rank : {32768, 65535, 65536, 1 << 20})
    CHECK(recorder::rank16(rank) == recorder::kNobody);
}

TEST_CASE("call steps: in a ring over messages they differ by the distance to the rank") {
  // Of rank 0's messages the barrier's are the first: two rounds of a send, a receive, and the
  // receive of the peer's next envelope. A step of the ring is a receive and a send. In the
  // step after, rank 3 waits for rank 0 to take what it has sent.
  for (const int num_sent : {0, 2}) {
    CAPTURE(num_sent);
    Scene scene("messages " + std::to_string(num_sent), {{{num_sent + 2, kNumSteps, 0},
                                                          {num_sent + 3, kNumSteps, 1},
                                                          {num_sent + 4, kNumSteps, 0}}});
    testing::MemoryNetwork network(kWorldSize);
    constexpr int kBarrier = 6, kFirstStep = 2;
    network.on_start([&](int rank, int num_started) {
      if (rank == 0 && num_started == kBarrier + kFirstStep + 2 * num_sent) scene.stand_still();
    });
    testing::run_placed(network, "abcd", [&](Communicator& communicator) {
      scene.run(communicator, testing::kPatient);
    });
  }
}

TEST_CASE("call steps: in a ring in shared memory") {
  // Rank 0 has sent nothing. Rank 3 waits for room for its third message to it.
  Scene scene("shm", {{{1, kNumSteps, 0}, {2, kNumSteps, 1}, {2, kNumSteps, 0}}});
  std::atomic<bool> is_inside = false;
  testing::run_ranks(kWorldSize, [&](Communicator& communicator) {
    WaitLimits limits = testing::kPatient;
    if (communicator.rank() == 0)
      limits.is_interrupted = [&] {  // while it waits for rank 1 to begin
        if (!is_inside.exchange(true)) scene.stand_still();
        return false;
      };
    scene.run(communicator, limits, [&] {
      while (communicator.rank() == 1 && !is_inside)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  });
}

}  // namespace
