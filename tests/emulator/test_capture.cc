// Graphs: what a stream captures, when that fails, and launches of it.
#include <functional>
#include <thread>
#include <vector>

#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

constexpr std::uint32_t kLimitMs = 30'000;

void begin(StreamHandle stream, CaptureMode mode = kCaptureGlobal) {
  check(extra().stream_begin_capture(stream, mode), "begin to capture");
}

/// Ends the capture and makes it ready to launch.
GraphExec end(StreamHandle stream) {
  Graph graph = nullptr;
  GraphExec exec = nullptr;
  check(extra().stream_end_capture(stream, &graph), "end the capture");
  check(extra().graph_instantiate(&exec, graph, 0), "instantiate");
  check(extra().graph_destroy(graph), "destroy the graph");
  return exec;
}

int status_of(StreamHandle stream) {
  int status = -1;
  check(extra().stream_is_capturing(stream, &status), "ask");
  return status;
}

/// Ends a capture that has failed, and leaves the stream usable.
void check_invalidated(StreamHandle stream) {
  CHECK(status_of(stream) == kCaptureInvalidated);
  CHECK(launch("toy_add", ToyAdd{}, stream) == kCaptureWasInvalidated);
  Graph graph = nullptr;
  CHECK(extra().stream_end_capture(stream, &graph) == kCaptureWasInvalidated);
  CHECK(graph == nullptr);
  CHECK(status_of(stream) == kCaptureNone);
  CHECK(driver().stream_synchronize(stream) == kSuccess);
}

TEST_CASE("a captured launch does nothing until it is launched, then again each time") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(64);
  ToyAdd parameter{data, 64, 3};
  begin(stream);
  CHECK(status_of(stream) == kCaptureActive);
  REQUIRE(launch("toy_add", parameter, stream, 2) == kSuccess);
  parameter.number = 100;  // what was captured is what it was
  const GraphExec exec = end(stream);
  CHECK(status_of(stream) == kCaptureNone);
  CHECK(values(data, 64) == std::vector<std::int32_t>(64, 0));
  for (int i = 0; i < 1000; ++i) REQUIRE(extra().graph_launch(exec, stream) == kSuccess);
  CHECK(extra().graph_exec_destroy(exec) == kSuccess);  // it stays for what was launched
  CHECK(extra().graph_launch(exec, stream) == kInvalidValue);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  CHECK(values(data, 64) == std::vector<std::int32_t>(64, 3000));
}

TEST_CASE("a graph keeps the order of its stream, and of the stream that it is launched in") {
  use_device(0);
  const StreamHandle stream = new_stream();
  const StreamHandle other = new_stream();
  std::int32_t* data = zeros(32);
  std::int32_t* copy = zeros(32);
  begin(stream);
  REQUIRE(launch("toy_add", ToyAdd{data, 32, 2}, stream) == kSuccess);
  REQUIRE(launch("toy_scale", ToyScale{data, 32, 5}, stream) == kSuccess);
  REQUIRE(driver().memcpy_async(address_of(copy), address_of(data), 128, stream) == kSuccess);
  REQUIRE(driver().memset_d8_async(address_of(data), 0, 64, stream) == kSuccess);
  const GraphExec exec = end(stream);
  std::uint32_t* go = flag();
  REQUIRE(launch("toy_await", ToyAwait{go, 1, kLimitMs, nullptr, nullptr}, other) == kSuccess);
  REQUIRE(launch("toy_add", ToyAdd{data, 32, 1}, other) == kSuccess);
  REQUIRE(extra().graph_launch(exec, other) == kSuccess);
  REQUIRE(launch("toy_add", ToyAdd{data, 32, 1}, other) == kSuccess);
  set(go, 1);
  REQUIRE(driver().stream_synchronize(other) == kSuccess);
  CHECK(values(copy, 32) == std::vector<std::int32_t>(32, 15));
  CHECK(values(data, 16) == std::vector<std::int32_t>(16, 1));
  CHECK(values(data + 16, 16) == std::vector<std::int32_t>(16, 16));
}

TEST_CASE("streams that fork from a capture run at once, and must join it again") {
  use_device(0);
  const StreamHandle stream = new_stream();
  const StreamHandle side = new_stream();
  const EventHandle fork = new_event();
  const EventHandle join = new_event();
  std::int32_t* data = zeros(1);
  const ToyAwait waits{flag(), 1, kLimitMs, flag(), flag()};
  begin(stream);
  REQUIRE(launch("toy_add", ToyAdd{data, 1, 1}, stream) == kSuccess);
  REQUIRE(driver().event_record(fork, stream) == kSuccess);
  REQUIRE(driver().stream_wait_event(side, fork, 0) == kSuccess);
  CHECK(status_of(side) == kCaptureActive);
  REQUIRE(launch("toy_await", waits, stream) == kSuccess);  // for the other branch
  REQUIRE(launch("toy_scale", ToyScale{data, 1, 10}, side) == kSuccess);
  REQUIRE(launch("toy_signal", ToySignal{waits.flag, 1}, side) == kSuccess);
  REQUIRE(driver().event_record(join, side) == kSuccess);
  REQUIRE(driver().stream_wait_event(stream, join, 0) == kSuccess);
  REQUIRE(launch("toy_add", ToyAdd{data, 1, 5}, stream) == kSuccess);
  const GraphExec exec = end(stream);
  CHECK(status_of(side) == kCaptureNone);
  for (int i = 0; i < 3; ++i) {
    set(waits.flag, 0);
    REQUIRE(extra().graph_launch(exec, stream) == kSuccess);
    REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  }
  CHECK(get(waits.num_running) == 3);
  CHECK(get(waits.num_gave_up) == 0);
  CHECK(values(data, 1)[0] == ((15 + 1) * 10 + 5 + 1) * 10 + 5);

  begin(stream);
  REQUIRE(driver().event_record(fork, stream) == kSuccess);
  REQUIRE(driver().stream_wait_event(side, fork, 0) == kSuccess);
  REQUIRE(launch("toy_add", ToyAdd{data, 1, 1}, side) == kSuccess);
  Graph graph = nullptr;
  CHECK(extra().stream_end_capture(side, &graph) == kCaptureUnmatched);
  CHECK(extra().stream_end_capture(stream, &graph) == kCaptureUnjoined);
  CHECK(graph == nullptr);
  CHECK(status_of(side) == kCaptureNone);
}

TEST_CASE("to ask or wait for a stream that captures ends the capture") {
  use_device(0);
  const StreamHandle stream = new_stream();
  for (const CaptureMode mode : {kCaptureGlobal, kCaptureThreadLocal, kCaptureRelaxed}) {
    begin(stream, mode);
    CHECK(driver().stream_synchronize(stream) == kCaptureUnsupported);
    check_invalidated(stream);
    begin(stream, mode);
    CHECK(driver().stream_query(stream) == kCaptureUnsupported);
    check_invalidated(stream);
  }
}

TEST_CASE("to ask or wait for a captured event ends the capture") {
  use_device(0);
  const StreamHandle stream = new_stream();
  const EventHandle event = new_event();
  begin(stream, kCaptureRelaxed);
  REQUIRE(driver().event_record(event, stream) == kSuccess);
  CHECK(driver().event_query(event) == kCapturedEvent);
  check_invalidated(stream);
  CHECK(driver().event_synchronize(event) == kCapturedEvent);  // still last recorded there
  CHECK(driver().event_record(event, stream) == kSuccess);
  CHECK(driver().event_synchronize(event) == kSuccess);
}

TEST_CASE("a capture keeps threads from what might wait for the device, as its mode says") {
  use_device(0);
  const StreamHandle stream = new_stream();
  const EventHandle elsewhere = new_event();
  struct Expected {
    CaptureMode mode;
    bool allows_itself;
    bool allows_others;
  };
  const auto try_to_ask = [&](int thread_mode) {
    int mode = thread_mode;
    check(driver().exchange_capture_mode(&mode), "exchange the mode");
    const Result result = driver().event_query(elsewhere);
    check(driver().exchange_capture_mode(&mode), "exchange the mode");
    return result;
  };
  const auto end_after = [&](bool is_allowed, Result result) {
    CHECK(result == (is_allowed ? kSuccess : kCaptureUnsupported));
    CHECK(status_of(stream) == (is_allowed ? kCaptureActive : kCaptureInvalidated));
    Graph graph = nullptr;
    extra().stream_end_capture(stream, &graph);
  };
  for (const Expected& expected :
       {Expected{kCaptureGlobal, false, false}, Expected{kCaptureThreadLocal, false, true},
        Expected{kCaptureRelaxed, true, true}}) {
    begin(stream, expected.mode);
    end_after(expected.allows_itself, try_to_ask(kCaptureGlobal));
    begin(stream, expected.mode);
    end_after(true, try_to_ask(kCaptureRelaxed));
    for (const int mode : {kCaptureGlobal, kCaptureThreadLocal, kCaptureRelaxed}) {
      begin(stream, expected.mode);
      Result result = -1;
      std::thread([&] { result = try_to_ask(mode); }).join();
      end_after(expected.allows_others || mode != kCaptureGlobal, result);
    }
  }
}

TEST_CASE("calls that a global capture forbids") {
  use_device(0);
  const StreamHandle stream = new_stream();
  const StreamHandle other = new_stream();
  std::int32_t* data = zeros(1);
  void* host = nullptr;
  DevicePtr address = 0;
  Module module = nullptr;
  const std::vector<std::function<Result()>> calls = {
      [&] { return driver().mem_alloc(&address, 16); },
      [&] { return driver().mem_free(address_of(data)); },
      [&] { return driver().mem_host_alloc(&host, 16, 0); },
      [&] { return driver().stream_synchronize(other); },
      [&] { return driver().module_load_data(&module, "RINGCOMM-EMULATED"); },
      [&] { return extra().ctx_synchronize(); },
  };
  for (const std::function<Result()>& call : calls) {
    begin(stream);
    CHECK(call() == kCaptureUnsupported);
    check_invalidated(stream);
  }
  begin(stream);
  CHECK(launch("toy_add", ToyAdd{data, 1, 1}, other) == kSuccess);
  end(stream);
}

TEST_CASE("a capture does not depend on what it has not captured") {
  use_device(0);
  const StreamHandle stream = new_stream();
  const StreamHandle other = new_stream();
  const EventHandle event = new_event();
  begin(stream);
  CHECK(driver().stream_wait_event(stream, event, 0) == kSuccess);  // never recorded
  REQUIRE(driver().event_record(event, other) == kSuccess);
  CHECK(driver().stream_wait_event(stream, event, 0) == kCaptureIsolation);
  check_invalidated(stream);

  begin(stream);
  begin(other);
  REQUIRE(driver().event_record(event, other) == kSuccess);
  CHECK(driver().stream_wait_event(stream, event, 0) == kCaptureMerge);
  Graph graph = nullptr;
  CHECK(extra().stream_end_capture(other, &graph) == kCaptureWasInvalidated);
  check_invalidated(stream);

  begin(stream);
  CHECK(driver().event_record(new_event(6), stream) == kCaptureUnsupported);
  check_invalidated(stream);
}

TEST_CASE("a blocking stream that captures forbids the null stream, another does not") {
  use_device(0);
  StreamHandle blocking = nullptr;
  REQUIRE(driver().stream_create(&blocking, 0) == kSuccess);
  std::int32_t* data = zeros(1);
  int status = -1;
  begin(blocking);
  CHECK(extra().stream_is_capturing(nullptr, &status) == kCaptureImplicit);
  CHECK(status_of(blocking) == kCaptureActive);
  CHECK(launch("toy_add", ToyAdd{data, 1, 1}, nullptr) == kCaptureImplicit);
  check_invalidated(blocking);
  const StreamHandle stream = new_stream();
  begin(stream);
  CHECK(launch("toy_add", ToyAdd{data, 1, 1}, nullptr) == kSuccess);
  CHECK(extra().stream_is_capturing(nullptr, &status) == kSuccess);
  CHECK(status == kCaptureNone);
  end(stream);
  CHECK(extra().stream_begin_capture(nullptr, kCaptureGlobal) == kCaptureUnsupported);
}

TEST_CASE("the thread that began a capture ends it, unless it is relaxed") {
  use_device(0);
  const StreamHandle stream = new_stream();
  Graph graph = nullptr;
  CHECK(extra().stream_end_capture(stream, &graph) == kInvalidValue);
  begin(stream);
  CHECK(extra().stream_begin_capture(stream, kCaptureGlobal) == kCaptureUnsupported);
  const auto end_elsewhere = [&] {
    Result result = -1;
    std::thread([&] {
      use_device(0);
      result = extra().stream_end_capture(stream, &graph);
    }).join();
    return result;
  };
  CHECK(end_elsewhere() == kCaptureWrongThread);
  CHECK(extra().stream_end_capture(stream, &graph) == kSuccess);
  begin(stream, kCaptureRelaxed);
  CHECK(end_elsewhere() == kSuccess);
  GraphExec exec = nullptr;
  CHECK(extra().graph_instantiate(&exec, nullptr, 0) == kInvalidValue);
  REQUIRE(extra().graph_instantiate(&exec, graph, 0) == kSuccess);
  CHECK(extra().graph_launch(exec, stream) == kSuccess);  // of no steps
  CHECK(driver().stream_synchronize(stream) == kSuccess);
}

}  // namespace
