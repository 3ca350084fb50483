// The recorder. Its files, whose cases run each in its own process, because recording never stops:
// tests/python/programs/test_trace.py checks the traces. The steps in which ranks wait, while one
// rank stands still inside a ring. What a rank counts of its peers: waits, late arrivals, bytes.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "children.h"
#include "collective_case.h"
#include "collectives/recorder.h"
#include "collectives/trace.h"
#include "host/wait.h"
#include "memory_messages.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;
using testing::expect;

constexpr std::size_t kNumEvents = 64;
constexpr std::size_t kNumBytes = sizeof(recorder::TraceHeader) + kNumEvents * 64;

// Both files of a recording, in memory.
struct Files {
  int events = ::memfd_create("events", 0);
  int log = ::memfd_create("log", 0);

  Files() {
    if (::ftruncate(events, static_cast<off_t>(kNumBytes)) != 0) _exit(3);
  }
  static std::string read(int fd) {
    std::string data(static_cast<std::size_t>(::lseek(fd, 0, SEEK_END)), '\0');
    if (::pread(fd, data.data(), data.size(), 0) != static_cast<ssize_t>(data.size())) _exit(3);
    return data;
  }
  std::string lines() const { return read(log); }
  recorder::TraceHeader header() const {
    recorder::TraceHeader header;
    std::memcpy(static_cast<void*>(&header), read(events).data(), sizeof(header));
    return header;
  }
  std::uint64_t count() const { return header().num_events; }
  recorder::Event event(std::size_t number) const {
    recorder::Event event;
    const std::size_t place = sizeof(recorder::TraceHeader) + number % kNumEvents * sizeof(event);
    std::memcpy(static_cast<void*>(&event), read(events).data() + place, sizeof(event));
    return event;
  }
};

// Whether all that `body` expects is so, in a process that records to its files.
bool holds(const std::function<bool(const Files&)>& body) {
  return testing::status_of_child([&] {
           const Files files;
           recorder::start_trace(files.events, files.log, kNumEvents);
           return body(files) ? 0 : 1;
         }) == 0;
}

recorder::Event step(int number) {
  return {.num_bytes = 8,
          .peer = 0,
          .waits_for = 1,
          .step = {number, 4, 1, 1},
          .chunk = 2,
          .kind = recorder::Kind::kStep,
          .op = OpKind::kReduceScatter};
}

TEST_CASE("trace: the cycle counter is used only where the kernel uses it") {
  const int file = ::memfd_create("current_clocksource", 0);
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  const auto uses_counter = [&](const std::string& text) {
    return ::ftruncate(file, 0) == 0 &&
           ::pwrite(file, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()) &&
           kernel_uses_cycle_counter(path.c_str());
  };
  for (const char* name : {"tsc\n", "tsc", "kvm-clock\n", "hyperv_clocksource_tsc_page\n"})
    CHECK(uses_counter(name));
  for (const char* name : {"hpet\n", "acpi_pm\n", "xen\n", "tsc-early\n", "\n", ""})
    CHECK_FALSE(uses_counter(name));
  ::close(file);
  CHECK_FALSE(kernel_uses_cycle_counter("/no/such/file"));
}

TEST_CASE("trace: nothing is described while nothing is recorded") {
  bool was_asked = false;
  {
    const recorder::Span span([&] {
      was_asked = true;
      return recorder::Event{};
    });
  }
  CHECK_FALSE(was_asked);
}

TEST_CASE("trace: a span is there from its begin on, and knows the collective around it") {
  CHECK(holds([](const Files& files) {
    const std::uint32_t group = 3;
    recorder::trace_group(group, "a \"group\"", 1, {4, 5, 6}, "shm");
    bool is_open = false;
    {
      const recorder::Span outer([&] { return recorder::Event{.seq = 7, .group = group}; });
      const recorder::Span inner([] { return step(3); });
      is_open = files.event(2).end_ticks == 0;
    }
    {
      const recorder::Span after([] { return step(0); });
    }
    const recorder::Event inner = files.event(2);
    const bool is_nested = inner.seq == 7 && inner.group == group && inner.step.step == 3 &&
                           files.event(1).begin_ticks <= inner.begin_ticks &&
                           inner.end_ticks <= files.event(1).end_ticks && inner.end_ticks > 0;
    const bool is_alone = files.event(3).group == 0;
    const bool has_lines =
        files.lines().find("\"name\": \"a \\\"group\\\"\", \"rank\": 1, \"ranks\": [4, 5, 6]") !=
        std::string::npos;
    return is_open && is_nested && is_alone && has_lines && files.count() == 3;
  }));
}

TEST_CASE("trace: the oldest events are overwritten, and an end finds no other's place") {
  CHECK(holds([](const Files& files) {
    std::uint64_t end_ticks = 0;
    {
      const recorder::Span outer([] { return recorder::Event{.seq = 7, .group = 3}; });
      for (int number = 1; number <= static_cast<int>(kNumEvents); ++number)
        const recorder::Span inner([&] { return step(number); });
      end_ticks = files.event(1).end_ticks;  // of the last one, which has the outer one's place
    }
    return files.count() == kNumEvents + 1 && files.event(1).step.step == kNumEvents &&
           files.event(1).end_ticks == end_ticks && files.event(2).step.step == 1;
  }));
}

TEST_CASE("trace: all threads record, and each has its own collective around its events") {
  CHECK(holds([](const Files& files) {
    constexpr std::uint32_t kNumThreads = 10;
    std::vector<std::thread> threads;
    for (std::uint32_t group = 1; group <= kNumThreads; ++group)
      threads.emplace_back([group] {
        const recorder::Span outer([&] { return recorder::Event{.seq = group, .group = group}; });
        for (int i = 0; i < 3; ++i) const recorder::Span inner([&] { return step(i); });
      });
    for (std::thread& thread : threads) thread.join();
    std::vector<int> num_of(kNumThreads + 1);
    for (std::size_t number = 1; number <= 4 * kNumThreads; ++number) {
      const recorder::Event event = files.event(number);
      if (event.number != number || event.seq != event.group || event.end_ticks == 0) return false;
      ++num_of[event.group];
    }
    return files.count() == 4 * kNumThreads && std::count(num_of.begin(), num_of.end(), 4) == 10;
  }));
}

TEST_CASE("trace: an event for which a rank waits keeps its place") {
  CHECK(holds([](const Files&) {
    const recorder::Call waits = recorder::trace({.waits_for = 1, .kind = recorder::Kind::kWait});
    for (std::size_t i = 0; i < 3 * kNumEvents; ++i)
      const recorder::Span span([] { return step(1); });
    const bool is_kept = waits.is_there();
    waits.end();
    for (std::size_t i = 0; i < kNumEvents; ++i) const recorder::Span span([] { return step(1); });
    return is_kept && !waits.is_there();
  }));
}

TEST_CASE("trace: a wait is one event from its begin on, in the collective around it") {
  CHECK(holds([](const Files& files) {
    const recorder::Span outer([] { return recorder::Event{.seq = 7, .group = 3}; });
    PeerEvent waits{.rank = 5, .begin_ticks = 123};
    recorder::trace_wait({.rank = 5, .sent_bytes = 8});  // is none
    for (int i = 0; i < 3; ++i) recorder::trace_wait(waits);
    const bool is_open = files.event(2).end_ticks == 0;
    recorder::trace_wait({.rank = 4, .begin_ticks = 200, .end_ticks = ticks()});  // inside it
    waits.end_ticks = ticks();
    recorder::trace_wait(waits);
    const recorder::Event first = files.event(2), second = files.event(3);
    return is_open && files.count() == 3 && first.waits_for == 5 && first.begin_ticks == 123 &&
           first.end_ticks != 0 && first.group == 3 && first.seq == 7 && second.waits_for == 4 &&
           second.end_ticks != 0;
  }));
}

TEST_CASE("trace: any thread may end an event, and one that was overwritten ends no other") {
  CHECK(holds([](const Files& files) {
    const recorder::Call call = recorder::trace({.kind = recorder::Kind::kMessage});
    const bool is_open = files.event(1).number == 1 && files.event(1).end_ticks == 0;
    std::thread([&] { call.end(); }).join();  // in another thread than that of its begin
    const bool has_ended = files.event(1).end_ticks >= files.event(1).begin_ticks;
    for (std::size_t i = 0; i < kNumEvents; ++i) const recorder::Span span([] { return step(1); });
    const std::uint64_t end_ticks = files.event(1).end_ticks;
    call.end();
    return is_open && has_ended && !call.is_there() && files.event(1).end_ticks == end_ticks;
  }));
}

TEST_CASE("trace: the header has a late moment by both clocks, however early the log ends") {
  CHECK(holds([](const Files& files) {
    const auto last_moment = [&] {
      const recorder::TraceHeader header = files.header();
      return header.late[header.late[0].ticks > header.late[1].ticks ? 0 : 1];
    };
    Anchor last = last_moment();
    int num_events = 0;
    for (int num_moments = 0; num_moments < 6; ++num_moments) {
      const Anchor begin = Anchor::now();
      Anchor moment = last;
      for (; moment.ns == last.ns && monotonic_ns() < begin.ns + 20'000'000'000; ++num_events) {
        if (num_moments % 2 == 0)
          const recorder::Span span([] { return step(0); });
        else
          recorder::trace_wait({.rank = 0, .begin_ticks = 1});
        moment = last_moment();
      }
      const Anchor end = Anchor::now();
      if (moment.ns < begin.ns || moment.ns > end.ns) return false;
      if (moment.ticks < begin.ticks || moment.ticks > end.ticks) return false;
      last = moment;
    }
    return num_events > 6;
  }));
}

TEST_CASE("trace: a forked child writes nothing to its parent's files") {
  CHECK(holds([](const Files& files) {
    {
      const recorder::Span span([] { return step(0); });
    }
    const std::string before = files.lines();
    testing::status_of_child([] {
      const recorder::Span span([] { return step(1); });
      recorder::trace_group(1, "the child's", 0, {0}, "");
      recorder::trace_wait({.rank = 0, .begin_ticks = 1});
      return 0;
    });
    return files.count() == 1 && files.lines() == before;
  }));
}

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
