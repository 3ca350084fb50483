// Handles of memory and events that go to other processes.
#include <csignal>
#include <thread>
#include <vector>

#include "emulator/child_process.h"
#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

constexpr std::uint32_t kLimitMs = 30'000;

IpcMemHandle handle_of(const void* address) {
  IpcMemHandle handle;
  check(driver().ipc_get_mem_handle(&handle, address_of(address)), "export memory");
  return handle;
}

// What can be shared by a handle: whole pieces of 2 MiB.
constexpr std::size_t kPieceBytes = std::size_t{2} << 20;
std::int32_t* piece() { return zeros(kPieceBytes / sizeof(std::int32_t)); }

RINGCOMM_CHILD(that_opens_memory) {
  use_device(0);
  const auto handle = from_message<IpcMemHandle>(receive_from_parent());
  DevicePtr address = 0;
  DevicePtr again = 0;
  MUST(driver().ipc_open_mem_handle(&address, handle, 0) == kInvalidValue);
  MUST(driver().ipc_open_mem_handle(&address, handle, kIpcLazyPeerAccess) == kSuccess);
  MUST(driver().ipc_open_mem_handle(&again, handle, kIpcLazyPeerAccess) == kSuccess);
  MUST(again == address);
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  MUST(driver().mem_get_address_range(&base, &num_bytes, address + 1) == kSuccess);
  MUST(base == address && num_bytes == kPieceBytes);
  MUST(values(elems_at(address), 1000) == std::vector<std::int32_t>(1000, 9));
  MUST(driver().mem_free(address) == kInvalidValue);  // it is another's
  MUST(driver().ipc_close_mem_handle(address) == kSuccess);
  const StreamHandle stream = new_stream();
  MUST(launch("toy_scale", ToyScale{elems_at(address), 1000, 3}, stream) == kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
  IpcMemHandle other;
  MUST(driver().ipc_get_mem_handle(&other, address) == kInvalidValue);
  MUST(driver().ipc_close_mem_handle(address) == kSuccess);
  MUST(driver().ipc_close_mem_handle(address) == kInvalidValue);
  IpcMemHandle nonsense = {};
  MUST(driver().ipc_open_mem_handle(&address, nonsense, kIpcLazyPeerAccess) == kInvalidValue);
}

TEST_CASE("memory of one process is opened in another") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = piece();
  REQUIRE(launch("toy_add", ToyAdd{data, 1000, 9}, stream) == kSuccess);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  const IpcMemHandle handle = handle_of(data + 10);  // of all of it, wherever it points
  DevicePtr address = 0;
  CHECK(driver().ipc_open_mem_handle(&address, handle, kIpcLazyPeerAccess) == kInvalidContext);
  ChildProcess child("that_opens_memory");
  child.send(as_message(handle));
  CHECK(child.wait() == 0);
  CHECK(values(data, 1000) == std::vector<std::int32_t>(1000, 27));
}

/// Sends the result of opening each handle that comes.
RINGCOMM_CHILD(that_tries_to_open) {
  use_device(0);
  for (;;) {
    const std::vector<char> message = receive_from_parent();
    if (message.size() == 1) return;
    DevicePtr address = 0;
    send_to_parent(as_message(driver().ipc_open_mem_handle(
        &address, from_message<IpcMemHandle>(message), kIpcLazyPeerAccess)));
  }
}

Result open_elsewhere(const IpcMemHandle& handle, const Environment& environment = {}) {
  ChildProcess child("that_tries_to_open", environment);
  child.send(as_message(handle));
  const auto result = from_message<Result>(child.receive());
  child.send({});
  CHECK(child.wait() == 0);
  return result;
}

TEST_CASE("freed memory is not opened, nor without cuIpc, nor of a GPU that is no peer") {
  use_device(1);
  std::int32_t* data = piece();
  const IpcMemHandle handle = handle_of(data);
  CHECK(open_elsewhere(handle) == kSuccess);
  CHECK(open_elsewhere(handle, {{"RINGCOMM_EMULATOR_IPC", "0"}}) == kNotSupported);
  CHECK(open_elsewhere(handle, {{"RINGCOMM_EMULATOR_PEER_ACCESS", "0"}}) == kPeerAccessUnsupported);
  CHECK(open_elsewhere(handle, {{"RINGCOMM_EMULATOR_PEER_ACCESS", "0"},
                                {"CUDA_VISIBLE_DEVICES", "1"}}) == kSuccess);
  REQUIRE(driver().mem_free(address_of(data)) == kSuccess);
  CHECK(open_elsewhere(handle) == kMapFailed);
  use_device(0);
}

TEST_CASE("a handle never hands out what shares a piece with other allocations") {
  use_device(0);
  IpcMemHandle handle;
  for (const std::size_t num_bytes : {std::size_t{4}, kPieceBytes - 4, kPieceBytes + 4})
    CHECK(driver().ipc_get_mem_handle(&handle, address_of(zeros(num_bytes / 4))) == kInvalidValue);
}

/// Opens what comes, and stays until told to close it.
RINGCOMM_CHILD(that_keeps_memory_open) {
  use_device(0);
  DevicePtr address = 0;
  MUST(driver().ipc_open_mem_handle(&address, from_message<IpcMemHandle>(receive_from_parent()),
                                    kIpcLazyPeerAccess) == kSuccess);
  send_to_parent({});
  receive_from_parent();
  MUST(driver().ipc_close_mem_handle(address) == kSuccess);
  send_to_parent({});
  receive_from_parent();
}
RINGCOMM_CHILD(that_frees_memory) {
  use_device(0);
  std::int32_t* data = piece();
  send_to_parent(as_message(handle_of(data)));
  receive_from_parent();
  MUST(driver().mem_free(address_of(data)) == kSuccess);
}
RINGCOMM_CHILD(that_destroys_an_event) {
  use_device(0);
  const EventHandle event = new_event(kEventDisableTiming | kEventInterprocess);
  IpcEventHandle handle;
  MUST(driver().ipc_get_event_handle(&handle, event) == kSuccess);
  send_to_parent(as_message(handle));
  receive_from_parent();
  MUST(driver().event_destroy(event) == kSuccess);
}

TEST_CASE("what is freed while another process has it open ends the one that frees it") {
  for (const bool is_open : {true, false}) {
    ChildProcess owner("that_frees_memory");
    ChildProcess user("that_keeps_memory_open");
    user.send(owner.receive());
    REQUIRE(!user.receive().empty());
    if (!is_open) {
      user.send({});
      REQUIRE(!user.receive().empty());
    }
    owner.send({});
    CHECK(owner.wait() == (is_open ? -SIGABRT : 0));
    user.send({});
    user.send({});
    user.wait();
  }
  use_device(0);
  for (const bool is_open : {true, false}) {
    ChildProcess owner("that_destroys_an_event");
    EventHandle event = nullptr;
    REQUIRE(driver().ipc_open_event_handle(&event, from_message<IpcEventHandle>(owner.receive())) ==
            kSuccess);
    if (!is_open) CHECK(driver().event_destroy(event) == kSuccess);
    owner.send({});
    CHECK(owner.wait() == (is_open ? -SIGABRT : 0));
  }
}

TEST_CASE("memory that a killed process had open may be freed") {
  ChildProcess owner("that_frees_memory");
  ChildProcess user("that_keeps_memory_open");
  user.send(owner.receive());
  REQUIRE(!user.receive().empty());
  user.kill();
  owner.send({});
  CHECK(owner.wait() == 0);
}

RINGCOMM_CHILD(that_cannot_export) {
  use_device(0);
  IpcMemHandle memory;
  IpcEventHandle event;
  MUST(driver().ipc_get_mem_handle(&memory, address_of(piece())) == kNotSupported);
  MUST(driver().ipc_get_event_handle(&event, new_event(6)) == kNotSupported);
}

TEST_CASE("without cuIpc nothing is exported") {
  ChildProcess child("that_cannot_export", {{"RINGCOMM_EMULATOR_IPC", "0"}});
  CHECK(child.wait() == 0);
}

RINGCOMM_CHILD(that_exports_and_stays) {
  use_device(0);
  send_to_parent(as_message(handle_of(piece())));
  receive_from_parent();
}

TEST_CASE("what a dead process exported is gone; what was opened before stays") {
  ChildProcess dies("that_exports_and_stays");
  const auto handle = from_message<IpcMemHandle>(dies.receive());
  use_device(0);
  DevicePtr address = 0;
  REQUIRE(driver().ipc_open_mem_handle(&address, handle, kIpcLazyPeerAccess) == kSuccess);
  dies.kill();
  CHECK(open_elsewhere(handle) == kMapFailed);
  CHECK(values(elems_at(address), 100) == std::vector<std::int32_t>(100, 0));
  CHECK(driver().ipc_close_mem_handle(address) == kSuccess);
}

/// A turn of a phase: the event of the other rank, which is recorded before this one's kernel.
RINGCOMM_CHILD(rank_with_events) {
  use_device(0);
  const auto memory = from_message<IpcMemHandle>(receive_from_parent());
  const auto theirs = from_message<IpcEventHandle>(receive_from_parent());
  DevicePtr address = 0;
  EventHandle event = nullptr;
  MUST(driver().ipc_open_mem_handle(&address, memory, kIpcLazyPeerAccess) == kSuccess);
  MUST(driver().ipc_open_event_handle(&event, theirs) == kSuccess);
  const EventHandle own = new_event(kEventDisableTiming | kEventInterprocess);
  IpcEventHandle handle;
  MUST(driver().ipc_get_event_handle(&handle, own) == kSuccess);
  send_to_parent(as_message(handle));
  const StreamHandle stream = new_stream();
  while (receive_from_parent().size() == 1) {
    MUST(driver().stream_wait_event(stream, event, 0) == kSuccess);
    MUST(launch("toy_scale", ToyScale{elems_at(address), 100, 2}, stream, 2) == kSuccess);
    MUST(driver().event_record(own, stream) == kSuccess);
    send_to_parent({});
  }
  MUST(driver().stream_synchronize(stream) == kSuccess);
}

TEST_CASE("two processes take turns by each other's events, whose hosts only submit") {
  use_device(0);
  ChildProcess other("rank_with_events", {{"RINGCOMM_EMULATOR_DELAY_US", "500"}});
  std::int32_t* data = piece();
  const EventHandle own = new_event(kEventDisableTiming | kEventInterprocess);
  IpcEventHandle handle;
  REQUIRE(driver().ipc_get_event_handle(&handle, own) == kSuccess);
  EventHandle event = nullptr;
  CHECK(driver().ipc_open_event_handle(&event, handle) == kInvalidContext);  // of this process
  other.send(as_message(handle_of(data)));
  other.send(as_message(handle));
  REQUIRE(driver().ipc_open_event_handle(&event, from_message<IpcEventHandle>(other.receive())) ==
          kSuccess);
  const StreamHandle stream = new_stream();
  std::int32_t expected = 0;
  for (int i = 0; i < 20; ++i) {
    REQUIRE(launch("toy_add", ToyAdd{data, 100, i}, stream, 2) == kSuccess);
    REQUIRE(driver().event_record(own, stream) == kSuccess);
    other.send({});
    REQUIRE(!other.receive().empty());
    REQUIRE(driver().stream_wait_event(stream, event, 0) == kSuccess);
    expected = 2 * (expected + i);
  }
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  CHECK(driver().event_query(event) == kSuccess);
  CHECK(values(data, 100) == std::vector<std::int32_t>(100, expected));
  other.send({'e', 'n', 'd'});
  CHECK(other.wait() == 0);
}

RINGCOMM_CHILD(that_looks_at_an_event) {
  use_device(0);
  EventHandle event = nullptr;
  MUST(driver().ipc_open_event_handle(
           &event, from_message<IpcEventHandle>(receive_from_parent())) == kSuccess);
  MUST(driver().event_query(event) == kSuccess);  // no record yet
  send_to_parent({});
  receive_from_parent();
  MUST(driver().event_query(event) == kErrorNotReady);
  const StreamHandle stream = new_stream();
  MUST(driver().stream_wait_event(stream, event, 0) == kSuccess);
  MUST(driver().stream_query(stream) == kErrorNotReady);
  send_to_parent({});
  MUST(driver().event_synchronize(event) == kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
}

TEST_CASE("another process sees whether an event was reached") {
  use_device(0);
  ChildProcess child("that_looks_at_an_event");
  const EventHandle event = new_event(kEventDisableTiming | kEventInterprocess);
  IpcEventHandle handle;
  REQUIRE(driver().ipc_get_event_handle(&handle, event) == kSuccess);
  child.send(as_message(handle));
  REQUIRE(!child.receive().empty());
  const StreamHandle stream = new_stream();
  std::uint32_t* go = flag();
  REQUIRE(launch("toy_await", ToyAwait{go, 1, kLimitMs, nullptr, nullptr}, stream) == kSuccess);
  REQUIRE(driver().event_record(event, stream) == kSuccess);
  child.send({});
  REQUIRE(!child.receive().empty());
  set(go, 1);
  CHECK(child.wait() == 0);
  CHECK(driver().ipc_get_event_handle(&handle, new_event()) == kInvalidHandle);
}

}  // namespace
