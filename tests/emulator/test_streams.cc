// Streams and events: order, what waits for what, and what does not.
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "emulator/child_process.h"
#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

constexpr std::uint32_t kLimitMs = 30'000;

/// Keeps a stream busy until release() or the end of the test.
class Busy {
 public:
  explicit Busy(StreamHandle stream) : flag_(flag()) {
    check(launch("toy_await", ToyAwait{flag_, 1, kLimitMs, nullptr, nullptr}, stream), "launch");
  }
  ~Busy() { release(); }
  void release() { set(flag_, 1); }

 private:
  std::uint32_t* flag_;
};

TEST_CASE("a stream runs what it gets in order, and is not ready before it is done") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(100);
  CHECK(driver().stream_query(stream) == kSuccess);
  Busy busy(stream);
  for (int i = 0; i < 5; ++i) {
    REQUIRE(launch("toy_add", ToyAdd{data, 100, 1}, stream) == kSuccess);
    REQUIRE(launch("toy_scale", ToyScale{data, 100, 3}, stream) == kSuccess);
  }
  CHECK(driver().stream_query(stream) == kErrorNotReady);
  CHECK(values(data, 100) == std::vector<std::int32_t>(100, 0));  // another stream: nothing waits
  busy.release();
  CHECK(driver().stream_synchronize(stream) == kSuccess);
  CHECK(driver().stream_query(stream) == kSuccess);
  CHECK(values(data, 100) == std::vector<std::int32_t>(100, 363));
}

TEST_CASE("a launch has its parameter as it was, and a destroyed stream ends its work") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(1);
  Busy busy(stream);
  ToyAdd parameter{data, 1, 7};
  void* parameters[] = {&parameter};
  REQUIRE(driver().launch_kernel(toy("toy_add"), 1, 1, 1, 32, 1, 1, 0, stream, parameters,
                                 nullptr) == kSuccess);
  parameter.number = 100;
  const EventHandle done = new_event();
  REQUIRE(driver().event_record(done, stream) == kSuccess);
  CHECK(driver().stream_destroy(stream) == kSuccess);
  CHECK(driver().stream_query(stream) == kInvalidHandle);
  CHECK(driver().stream_destroy(stream) == kInvalidHandle);
  busy.release();
  CHECK(driver().event_synchronize(done) == kSuccess);
  CHECK(values(data, 1)[0] == 7);
}

TEST_CASE("the null stream is a stream of its context, by two names") {
  const Context context = use_device(0);
  std::int32_t* data = zeros(4);
  REQUIRE(launch("toy_add", ToyAdd{data, 4, 5}, nullptr) == kSuccess);
  const auto legacy = reinterpret_cast<StreamHandle>(std::uintptr_t{1});
  REQUIRE(launch("toy_scale", ToyScale{data, 4, 2}, legacy) == kSuccess);
  CHECK(driver().stream_synchronize(nullptr) == kSuccess);
  CHECK(values(data, 4) == std::vector<std::int32_t>(4, 10));
  Busy busy(nullptr);
  CHECK(driver().stream_query(nullptr) == kErrorNotReady);
  CHECK(driver().stream_destroy(nullptr) == kInvalidHandle);
  use_device(1);
  CHECK(driver().stream_query(nullptr) == kSuccess);  // that of the other device
  REQUIRE(driver().ctx_set_current(context) == kSuccess);
}

TEST_CASE("a stream waits for an event of another one") {
  use_device(0);
  const StreamHandle first = new_stream();
  const StreamHandle second = new_stream();
  const EventHandle event = new_event();
  std::int32_t* data = zeros(50);
  Busy busy(first);
  REQUIRE(launch("toy_add", ToyAdd{data, 50, 4}, first) == kSuccess);
  REQUIRE(driver().event_record(event, first) == kSuccess);
  REQUIRE(driver().stream_wait_event(second, event, 0) == kSuccess);
  REQUIRE(launch("toy_scale", ToyScale{data, 50, 10}, second) == kSuccess);
  CHECK(driver().event_query(event) == kErrorNotReady);
  CHECK(driver().stream_query(second) == kErrorNotReady);
  busy.release();
  CHECK(driver().stream_synchronize(second) == kSuccess);
  CHECK(driver().event_query(event) == kSuccess);
  CHECK(values(data, 50) == std::vector<std::int32_t>(50, 40));
}

TEST_CASE("streams of two devices wait for each other's events") {
  use_device(1);
  const StreamHandle other = new_stream();
  const EventHandle event = new_event();
  Busy busy(other);
  REQUIRE(driver().event_record(event, other) == kSuccess);
  use_device(0);
  const StreamHandle stream = new_stream();
  CHECK(driver().event_record(event, stream) == kInvalidHandle);  // of another context
  CHECK(driver().stream_wait_event(stream, event, 0) == kSuccess);
  CHECK(driver().stream_query(stream) == kErrorNotReady);
  busy.release();
  CHECK(driver().stream_synchronize(stream) == kSuccess);
}

TEST_CASE("an event that was never recorded is waited for by nobody") {
  use_device(0);
  const StreamHandle stream = new_stream();
  for (const unsigned flags : {2u, 6u}) {
    const EventHandle event = new_event(flags);
    CHECK(driver().event_query(event) == kSuccess);
    CHECK(driver().event_synchronize(event) == kSuccess);
    CHECK(driver().stream_wait_event(stream, event, 0) == kSuccess);
    CHECK(driver().stream_synchronize(stream) == kSuccess);
  }
}

TEST_CASE("a wait is for the record that was last when it was made") {
  use_device(0);
  for (const unsigned flags : {2u, 6u}) {
    const StreamHandle recorded = new_stream();
    const StreamHandle before = new_stream();
    const StreamHandle after = new_stream();
    const EventHandle event = new_event(flags);
    Busy holds(before);  // so that its wait is reached only after the event is recorded again
    Busy first(recorded);
    REQUIRE(driver().event_record(event, recorded) == kSuccess);
    REQUIRE(driver().stream_wait_event(before, event, 0) == kSuccess);
    Busy second(recorded);
    REQUIRE(driver().event_record(event, recorded) == kSuccess);
    REQUIRE(driver().stream_wait_event(after, event, 0) == kSuccess);
    CHECK(driver().stream_query(before) == kErrorNotReady);
    holds.release();
    first.release();
    CHECK(driver().stream_synchronize(before) == kSuccess);
    CHECK(driver().stream_query(after) == kErrorNotReady);
    CHECK(driver().event_query(event) == kErrorNotReady);
    // Recorded again on an idle stream: the old wait is still for the old record.
    const StreamHandle idle = new_stream();
    REQUIRE(driver().event_record(event, idle) == kSuccess);
    CHECK(driver().event_synchronize(event) == kSuccess);
    CHECK(driver().stream_query(after) == kErrorNotReady);
    second.release();
    CHECK(driver().stream_synchronize(after) == kSuccess);
  }
}

TEST_CASE("an event may be destroyed while a stream waits for it") {
  use_device(0);
  const StreamHandle recorded = new_stream();
  const StreamHandle waits = new_stream();
  const EventHandle event = new_event();
  Busy busy(recorded);
  REQUIRE(driver().event_record(event, recorded) == kSuccess);
  REQUIRE(driver().stream_wait_event(waits, event, 0) == kSuccess);
  CHECK(driver().event_destroy(event) == kSuccess);
  CHECK(driver().event_query(event) == kInvalidHandle);
  CHECK(driver().stream_query(waits) == kErrorNotReady);
  busy.release();
  CHECK(driver().stream_synchronize(waits) == kSuccess);
}

TEST_CASE("freeing memory waits for the device") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(1);
  Busy busy(stream);
  REQUIRE(launch("toy_add", ToyAdd{data, 1, 1}, stream) == kSuccess);
  std::thread releases([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    busy.release();
  });
  CHECK(driver().mem_free(address_of(data)) == kSuccess);
  CHECK(driver().stream_query(stream) == kSuccess);
  releases.join();
}

TEST_CASE("arguments of streams and events are checked") {
  use_device(0);
  StreamHandle stream = nullptr;
  EventHandle event = nullptr;
  CHECK(driver().stream_create(nullptr, 0) == kInvalidValue);
  CHECK(driver().stream_create(&stream, 2) == kInvalidValue);
  CHECK(driver().event_create(&event, kEventInterprocess) == kInvalidValue);
  CHECK(driver().event_create(&event, 8) == kInvalidValue);
  CHECK(driver().event_query(nullptr) == kInvalidHandle);
  CHECK(driver().stream_wait_event(nullptr, nullptr, 0) == kInvalidHandle);
  CHECK(driver().stream_query(reinterpret_cast<StreamHandle>(&event)) == kInvalidHandle);
  std::thread([] {
    StreamHandle other = nullptr;
    CHECK(driver().stream_create(&other, 0) == kInvalidContext);
    CHECK(driver().stream_query(nullptr) == kInvalidContext);
  }).join();
}

RINGCOMM_CHILD(that_forgets_to_wait) {
  use_device(0);
  std::int32_t* data = zeros(10);
  const auto num_blocks = from_message<unsigned>(receive_from_parent());
  MUST(std::freopen("/dev/null", "w", stderr) != nullptr);  // where the report goes
  MUST(launch("toy_add", ToyAdd{data, 10, 1}, new_stream(), num_blocks) == kSuccess);
  MUST(launch("toy_add", ToyAdd{data, 10, 1}, new_stream(), num_blocks) == kSuccess);
  MUST(extra().ctx_synchronize() == kSuccess);
}

TEST_CASE("ThreadSanitizer sees kernels of two streams race that no event keeps apart") {
#ifdef __SANITIZE_THREAD__
  constexpr int kWanted = 66;
#else
  constexpr int kWanted = 0;
#endif
  for (const unsigned num_blocks : {1u, 2u}) {
    int status = -1;
    // On a busy machine one thread may run both kernels, and then there is no race.
    for (int attempt = 0; attempt < 50 && status != kWanted; ++attempt) {
      ChildProcess child("that_forgets_to_wait", {{"TSAN_OPTIONS", "exitcode=66 halt_on_error=1"}});
      child.send(as_message(num_blocks));
      status = child.wait();
    }
    CHECK(status == kWanted);
  }
}

RINGCOMM_CHILD(delayed_streams) {
  use_device(0);
  const StreamHandle streams[] = {new_stream(), new_stream(), new_stream()};
  std::int32_t* data = zeros(10);
  std::int32_t expected = 0;
  for (int i = 0; i < 60; ++i) {
    const StreamHandle stream = streams[i % 3];
    const EventHandle event = new_event();
    MUST(launch("toy_add", ToyAdd{data, 10, i}, stream, 2) == kSuccess);
    MUST(launch("toy_scale", ToyScale{data, 10, i % 2 ? -1 : 1}, stream, 2) == kSuccess);
    MUST(driver().event_record(event, stream) == kSuccess);
    MUST(driver().stream_wait_event(streams[(i + 1) % 3], event, 0) == kSuccess);
    MUST(driver().event_destroy(event) == kSuccess);
    expected = (expected + i) * (i % 2 ? -1 : 1);
  }
  MUST(extra().ctx_synchronize() == kSuccess);
  MUST(values(data, 10) == std::vector<std::int32_t>(10, expected));
}

TEST_CASE("events keep the order of streams that are delayed at random") {
  ChildProcess child("delayed_streams", {{"RINGCOMM_EMULATOR_DELAY_US", "1000"}});
  CHECK(child.wait() == 0);
}

}  // namespace
