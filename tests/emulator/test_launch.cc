// Modules and kernels: grids, blocks, threads, and what a GPU can hold at a time.
#include <thread>
#include <vector>

#include "emulator/child_process.h"
#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

constexpr std::uint32_t kLimitMs = 30'000;
constexpr std::uint32_t kShortMs = 300;  // of waits that must not succeed

TEST_CASE("a module is an emulated image, and a function one of its kernels") {
  use_device(0);
  Module module = nullptr;
  Function function = nullptr;
  CHECK(driver().module_load_data(&module, nullptr) == kInvalidValue);
  CHECK(driver().module_load_data(&module,
                                  "\x7f"
                                  "ELF") == kInvalidImage);
  REQUIRE(driver().module_load_data(&module, "RINGCOMM-EMULATED and more") == kSuccess);
  CHECK(driver().module_get_function(&function, module, "no_such_kernel") == kNotFound);
  REQUIRE(driver().module_get_function(&function, module, "toy_add") == kSuccess);
  Function again = nullptr;
  REQUIRE(driver().module_get_function(&again, module, "toy_add") == kSuccess);
  CHECK(again == function);
  CHECK(driver().module_unload(module) == kSuccess);
  CHECK(driver().module_unload(module) == kInvalidHandle);
  ToyAdd parameter;
  void* parameters[] = {&parameter};
  CHECK(driver().launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr) ==
        kInvalidHandle);
}

TEST_CASE("every block of a grid runs once, also of one larger than the GPU") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(1000);
  for (const unsigned num_blocks : {1u, 3u, 4u, 5u, 64u})
    REQUIRE(launch("toy_add", ToyAdd{data, 1000, 1}, stream, num_blocks) == kSuccess);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  CHECK(values(data, 1000) == std::vector<std::int32_t>(1000, 5));
}

std::uint32_t num_met(unsigned num_blocks, std::uint32_t limit_ms) {
  const StreamHandle stream = new_stream();
  const ToyMeet parameter{flag(), flag(), limit_ms};
  check(launch("toy_meet", parameter, stream, num_blocks), "launch");
  check(driver().stream_synchronize(stream), "wait");
  return get(parameter.num_met);
}

TEST_CASE("blocks that fit run together; of a grid that does not fit the last wait for the first") {
  use_device(0);
  CHECK(num_met(4, kLimitMs) == 4);
  CHECK(num_met(5, kShortMs) < 5);  // the fifth starts when another has given up
}

/// How many of four blocks on device 0 give up waiting for a kernel on `device`.
std::uint32_t num_gave_up(DeviceOrdinal device, std::uint32_t limit_ms) {
  const ToyAwait parameter{flag(), 1, limit_ms, flag(), flag()};
  use_device(0);
  const StreamHandle waits = new_stream();
  check(launch("toy_await", parameter, waits, 4), "launch");
  while (get(parameter.num_running) < 4) std::this_thread::yield();
  use_device(device);
  const StreamHandle signals = new_stream();
  check(launch("toy_signal", ToySignal{parameter.flag, 1}, signals), "launch");
  check(driver().stream_synchronize(signals), "wait");
  use_device(0);
  check(driver().stream_synchronize(waits), "wait");
  return get(parameter.num_gave_up);
}

TEST_CASE("grids of two streams share what a GPU holds, and two GPUs hold twice as much") {
  use_device(0);
  CHECK(num_gave_up(0, kShortMs) > 0);
  CHECK(num_gave_up(1, kLimitMs) == 0);
}

TEST_CASE("occupancy goes by threads, shared memory and what the emulated GPU may hold") {
  use_device(0);
  int num_blocks = -1;
  const auto occupancy = [&](int threads, std::size_t shared_bytes) {
    return driver().occupancy_max_active_blocks(&num_blocks, toy("toy_add"), threads, shared_bytes);
  };
  CHECK(occupancy(512, 0) == kSuccess);
  CHECK(num_blocks == 2);
  CHECK(occupancy(1024, 150 << 10) == kSuccess);
  CHECK(num_blocks == 1);
  CHECK(occupancy(2048, 0) == kSuccess);
  CHECK(num_blocks == 0);
  CHECK(occupancy(0, 0) == kInvalidValue);
}

TEST_CASE("arguments of launches are checked") {
  const Context context = use_device(0);
  const Function function = toy("toy_add");
  ToyAdd parameter;
  void* parameters[] = {&parameter};
  const auto launch_as = [&](unsigned grid, unsigned block, unsigned shared_bytes) {
    return driver().launch_kernel(function, grid, 1, 1, block, 1, 1, shared_bytes, nullptr,
                                  parameters, nullptr);
  };
  CHECK(launch_as(1, 1, 0) == kSuccess);
  CHECK(launch_as(0, 1, 0) == kInvalidValue);
  CHECK(launch_as(1, 0, 0) == kInvalidValue);
  CHECK(launch_as(1, 1025, 0) == kInvalidValue);
  CHECK(launch_as(1, 1, 228 << 10) == kInvalidValue);
  CHECK(driver().launch_kernel(function, 1, 2, 1, 1, 1, 1, 0, nullptr, parameters, nullptr) ==
        kNotSupported);
  CHECK(driver().launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) ==
        kInvalidValue);
  CHECK(driver().launch_kernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr) ==
        kInvalidHandle);
  use_device(1);
  CHECK(launch_as(1, 1, 0) == kInvalidHandle);  // a function of another device
  REQUIRE(driver().ctx_set_current(context) == kSuccess);
}

RINGCOMM_CHILD(threads_of_blocks) {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* slots = zeros(8 * 3);
  std::int32_t* sums = zeros(8);
  MUST(launch("toy_threads", ToyThreads{slots, sums}, stream, 8) == kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
  MUST(values(sums, 8) == std::vector<std::int32_t>(8, 6));
  // A block of two threads is played by two.
  MUST(launch("toy_threads", ToyThreads{slots, sums}, stream, 8, 2) == kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
  MUST(values(sums, 8) == std::vector<std::int32_t>(8, 3));
}

TEST_CASE("threads of a block meet at its barrier") {
  ChildProcess child("threads_of_blocks", {{"RINGCOMM_EMULATOR_THREADS", "3"}});
  CHECK(child.wait() == 0);
}

/// One of two ranks on a GPU: a kernel of the first spins for one of the second.
RINGCOMM_CHILD(rank_that_spins) {
  use_device(0);
  DevicePtr address = 0;
  MUST(driver().mem_alloc(&address, std::size_t{2} << 20) == kSuccess);
  IpcMemHandle handle;
  MUST(driver().ipc_get_mem_handle(&handle, address) == kSuccess);
  const auto limit_ms = from_message<std::uint32_t>(receive_from_parent());
  const ToyAwait parameter{reinterpret_cast<std::uint32_t*>(address), 1, limit_ms, flag(), flag()};
  const StreamHandle stream = new_stream();
  MUST(launch("toy_await", parameter, stream) == kSuccess);
  while (get(parameter.num_running) == 0) std::this_thread::yield();
  send_to_parent(as_message(handle));
  MUST(driver().stream_synchronize(stream) == kSuccess);
  send_to_parent(as_message(get(parameter.num_gave_up)));
  receive_from_parent();
}

RINGCOMM_CHILD(rank_that_signals) {
  use_device(0);
  const auto handle = from_message<IpcMemHandle>(receive_from_parent());
  DevicePtr address = 0;
  MUST(driver().ipc_open_mem_handle(&address, handle, kIpcLazyPeerAccess) == kSuccess);
  send_to_parent({});
  receive_from_parent();
  const StreamHandle stream = new_stream();
  MUST(launch("toy_signal", ToySignal{reinterpret_cast<std::uint32_t*>(address), 1}, stream) ==
       kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
}

/// Two ranks on a GPU, up to where the first spins and the second is about to launch.
struct TwoRanks {
  TwoRanks(const Environment& environment, std::uint32_t limit_ms)
      : spins("rank_that_spins", environment), signals("rank_that_signals", environment) {
    spins.send(as_message(limit_ms));
    signals.send(spins.receive());
    CHECK(!signals.receive().empty());
  }
  ChildProcess spins;
  ChildProcess signals;
};

const Environment kNoMps = {{"RINGCOMM_EMULATOR_MPS", "0"}};

std::uint32_t num_spun_in_vain(const Environment& environment, std::uint32_t limit_ms) {
  TwoRanks ranks(environment, limit_ms);
  ranks.signals.send({});
  const auto num_gave_up = from_message<std::uint32_t>(ranks.spins.receive());
  CHECK(ranks.signals.wait() == 0);  // its kernel runs in the end
  ranks.spins.send({});
  CHECK(ranks.spins.wait() == 0);
  return num_gave_up;
}

TEST_CASE("kernels of two processes run at once under MPS, and never without") {
  CHECK(num_spun_in_vain({}, kLimitMs) == 0);
  CHECK(num_spun_in_vain(kNoMps, kShortMs) == 1);
}

TEST_CASE("blocks of all processes share what a GPU holds, whatever it says that it holds") {
  Environment small = {{"RINGCOMM_EMULATOR_SMS", "1"}, {"RINGCOMM_EMULATOR_BLOCKS_PER_SM", "2"}};
  CHECK(num_spun_in_vain(small, kLimitMs) == 0);
  small["RINGCOMM_EMULATOR_BLOCKS_PER_SM"] = "1";
  CHECK(num_spun_in_vain(small, kShortMs) == 1);
  small["RINGCOMM_EMULATOR_SMS"] = "2";
  CHECK(num_spun_in_vain(small, kLimitMs) == 0);
  small["RINGCOMM_EMULATOR_REAL_SMS"] = "1";
  CHECK(num_spun_in_vain(small, kShortMs) == 1);
}

TEST_CASE(
    "blocks go to different multiprocessors, and one that fills one waits until it is empty") {
  use_device(0);
  for (const unsigned num_waiting : {1u, 2u}) {
    const ToyAwait parameter{flag(), 1, num_waiting == 1 ? kLimitMs : kShortMs, flag(), flag()};
    const StreamHandle waits = new_stream();
    check(launch("toy_await", parameter, waits, num_waiting), "launch");
    while (get(parameter.num_running) < num_waiting) std::this_thread::yield();
    ToySignal signal{parameter.flag, 1};
    void* parameters[] = {&signal};
    const StreamHandle signals = new_stream();
    check(driver().launch_kernel(toy("toy_signal"), 1, 1, 1, 1, 1, 1, 227 << 10, signals,
                                 parameters, nullptr),
          "launch");
    check(driver().stream_synchronize(signals), "wait");
    check(driver().stream_synchronize(waits), "wait");
    CHECK((get(parameter.num_gave_up) > 0) == (num_waiting == 2));
  }
}

RINGCOMM_CHILD(streams_without_mps) {
  use_device(0);
  const StreamHandle stream = new_stream();
  const ToyAwait parameter{flag(), 1, kLimitMs, flag(), flag()};
  MUST(launch("toy_await", parameter, stream) == kSuccess);
  MUST(launch("toy_signal", ToySignal{parameter.flag, 1}, new_stream()) == kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
  MUST(get(parameter.num_gave_up) == 0);
}

TEST_CASE("kernels of one process run at once without MPS, too") {
  ChildProcess child("streams_without_mps", {{"RINGCOMM_EMULATOR_MPS", "0"}});
  CHECK(child.wait() == 0);
}

TEST_CASE("a process killed in a kernel gives the GPU back") {
  TwoRanks ranks(kNoMps, kLimitMs);
  ranks.spins.kill();
  ranks.signals.send({});
  CHECK(ranks.signals.wait() == 0);
}

}  // namespace
