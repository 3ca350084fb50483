// The recorder and its files. Each case runs in its own process, because recording never stops.
// tests/python/programs/test_trace.py checks the traces.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "children.h"
#include "collectives/trace.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;

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

}  // namespace
