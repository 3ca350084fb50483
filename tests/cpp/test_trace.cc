// The recorder and its files. Each case runs in its own process, because recording never stops.
// tests/python/programs/test_trace.py checks the traces.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/trace.h"
#include "host/process.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;

const std::size_t kNumEvents = page_bytes() / 64;  // of a thread: one page
const std::size_t kPageBytes = page_bytes();

// Both files of a recording, in memory.
struct Files {
  int events = ::memfd_create("events", 0);
  int log = ::memfd_create("log", 0);

  static std::string read(int fd) {
    std::string data(static_cast<std::size_t>(::lseek(fd, 0, SEEK_END)), '\0');
    if (::pread(fd, data.data(), data.size(), 0) != static_cast<ssize_t>(data.size())) _exit(3);
    return data;
  }
  std::string lines() const { return read(log); }
  std::size_t num_threads() const { return (read(events).size() / kPageBytes - 1) / 2; }
  std::uint64_t count(std::size_t thread) const {
    std::uint64_t count = 0;
    std::memcpy(&count, read(events).data() + (1 + 2 * thread) * kPageBytes, sizeof(count));
    return count;
  }
  trace::Event event(std::size_t thread, std::size_t slot) const {
    trace::Event event;
    const std::size_t place = (2 + 2 * thread) * kPageBytes + slot * sizeof(event);
    std::memcpy(static_cast<void*>(&event), read(events).data() + place, sizeof(event));
    return event;
  }
};

// Whether all that `body` expects is so, in a process that records to its files.
bool holds(const std::function<bool(const Files&)>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    const Files files;
    trace::start(files.events, files.log, kNumEvents);
    ::_exit(body(files) ? 0 : 1);
  }
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

trace::Event step(int number) {
  return {.num_bytes = 8,
          .to = 0,
          .from = 1,
          .chunk = 2,
          .step = static_cast<std::int16_t>(number),
          .kind = trace::Kind::kStep,
          .name = trace::name_number("reduce_scatter")};
}

TEST_CASE("trace: nothing is described while nothing is recorded") {
  bool was_asked = false;
  {
    const trace::Span span([&] {
      was_asked = true;
      return trace::Event{};
    });
  }
  CHECK_FALSE(was_asked);
}

TEST_CASE("trace: a span is there from its begin on, and knows the collective around it") {
  CHECK(holds([](const Files& files) {
    const std::uint32_t group = trace::add_group("a \"group\"", 1, {4, 5, 6}, "shm");
    bool is_open = false;
    {
      const trace::Span outer(
          [&] { return trace::Event{.seq = 7, .group = group, .kind = trace::Kind::kCollective}; });
      const trace::Span inner([] { return step(3); });
      is_open = files.event(0, 1).end_ns == 0;
    }
    {
      const trace::Span after([] { return step(0); });
    }
    const trace::Event inner = files.event(0, 1);
    const bool is_nested = inner.seq == 7 && inner.group == group && inner.step == 3 &&
                           files.event(0, 0).begin_ns <= inner.begin_ns &&
                           inner.end_ns <= files.event(0, 0).end_ns && inner.end_ns > 0;
    const bool is_alone = files.event(0, 2).group == trace::kNoGroup;
    const bool has_lines =
        files.lines().find("\"name\": \"a \\\"group\\\"\", \"rank\": 1, \"ranks\": [4, 5, 6]") !=
            std::string::npos &&
        files.lines().find("\"text\": \"reduce_scatter\"") != std::string::npos;
    return is_open && is_nested && is_alone && has_lines && files.count(0) == 3;
  }));
}

TEST_CASE("trace: the oldest events are overwritten, and an end finds no other's place") {
  CHECK(holds([](const Files& files) {
    std::uint64_t end_ns = 0;
    {
      const trace::Span outer([] { return step(-1); });
      for (int number = 0; number < static_cast<int>(kNumEvents); ++number)
        const trace::Span inner([&] { return step(number); });
      end_ns = files.event(0, 0).end_ns;  // of the last one, which has the outer one's place
    }
    return files.count(0) == kNumEvents + 1 &&
           files.event(0, 0).step == static_cast<int>(kNumEvents) - 1 &&
           files.event(0, 0).end_ns == end_ns && files.event(0, 1).step == 0;
  }));
}

TEST_CASE("trace: each thread has a buffer, and those that have ended hand it on") {
  CHECK(holds([](const Files& files) {
    const auto record = [] { const trace::Span span([] { return step(0); }); };
    record();
    for (int i = 0; i < 10; ++i) std::thread(record).join();
    return files.num_threads() == 2 && files.count(0) == 1 && files.count(1) == 10;
  }));
}

TEST_CASE("trace: what has no buffer is counted") {
  CHECK(holds([](const Files& files) {
    std::vector<std::thread> threads;
    std::atomic<int> num_there = 0;
    for (int i = 0; i < 66; ++i)  // none ends before all have recorded
      threads.emplace_back([&] {
        const trace::Span span([] { return step(0); });
        ++num_there;
        while (num_there < 66) std::this_thread::yield();
      });
    for (std::thread& thread : threads) thread.join();
    std::uint64_t num_lost = 0;
    std::memcpy(&num_lost, Files::read(files.events).data() + 8, sizeof(num_lost));
    return files.num_threads() == 64 && num_lost == 2;
  }));
}

TEST_CASE("trace: a forked child writes nothing to its parent's files") {
  CHECK(holds([](const Files& files) {
    {
      const trace::Span span([] { return step(0); });
    }
    const std::string before = files.lines();
    const pid_t child = ::fork();
    if (child == 0) {
      const trace::Span span([] { return step(1); });
      trace::add_group("the child's", 0, {0}, "");
      trace::record_alive();
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
    return files.count(0) == 1 && files.lines() == before;
  }));
}

}  // namespace
