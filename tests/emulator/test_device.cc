// Devices, contexts, errors, and what the environment makes of them.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>

#include "emulator/child_process.h"
#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

int attribute(int which, DeviceOrdinal device = 0) {
  int value = -1;
  check(driver().device_get_attribute(&value, which, device), "ask for an attribute");
  return value;
}

std::string uuid(DeviceOrdinal device) {
  DeviceUuid found;
  check(driver().device_get_uuid(&found, device), "ask for the UUID");
  return {found.bytes, sizeof(found.bytes)};
}

TEST_CASE("devices are counted, named and described") {
  int count = 0;
  REQUIRE(driver().device_get_count(&count) == kSuccess);
  CHECK(count == 2);
  DeviceOrdinal device = -1;
  CHECK(driver().device_get(&device, 1) == kSuccess);
  CHECK(device == 1);
  CHECK(driver().device_get(&device, 2) == kInvalidDevice);
  CHECK(driver().device_get(&device, -1) == kInvalidDevice);
  char name[32];
  REQUIRE(driver().device_get_name(name, sizeof(name), 1) == kSuccess);
  CHECK(std::string(name) == "Emulated GPU 1");
  REQUIRE(driver().device_get_name(name, 5, 1) == kSuccess);
  CHECK(std::string(name) == "Emul");
  CHECK(uuid(0) != uuid(1));
  int version = 0;
  REQUIRE(driver().driver_get_version(&version) == kSuccess);
  CHECK(version >= 12000);
}

TEST_CASE("attributes are those of a small GPU of capability 9.0") {
  CHECK(attribute(kMultiprocessorCount) == 2);
  CHECK(attribute(kCooperativeLaunch) == 1);
  CHECK(attribute(kComputeCapabilityMajor) == 9);
  CHECK(attribute(kComputeCapabilityMinor) == 0);
  CHECK(attribute(kVirtualMemoryManagementSupported) == 1);
  CHECK(attribute(kHandleTypePosixFdSupported) == 1);
  CHECK(attribute(kMpsEnabled) == 1);
  int value = 0;
  CHECK(driver().device_get_attribute(&value, 100'000, 0) == kInvalidValue);
  CHECK(driver().device_get_attribute(&value, kMpsEnabled, 7) == kInvalidDevice);
}

RINGCOMM_CHILD(with_other_settings) {
  MUST(attribute(kMultiprocessorCount) == 5);
  MUST(attribute(kVirtualMemoryManagementSupported) == 0);
  MUST(attribute(kHandleTypePosixFdSupported) == 0);
  MUST(attribute(kMpsEnabled) == 0);
  int value = -1;
  MUST(driver().device_can_access_peer(&value, 0, 1) == kSuccess);
  MUST(value == 0);
  int count = 0;
  MUST(driver().device_get_count(&count) == kSuccess);
  MUST(count == 2);  // the list ends at what no GPU has
  const Context other = use_device(1);
  use_device(0);
  MUST(driver().ctx_enable_peer_access(other, 0) == kPeerAccessUnsupported);
  int num_blocks = 0;
  MUST(driver().occupancy_max_active_blocks(&num_blocks, toy("toy_add"), 256, 0) == kSuccess);
  MUST(num_blocks == 3);
  send_to_parent(as_message(uuid(0)[12]));
}

TEST_CASE("the environment decides what a GPU can do, and which are seen") {
  ChildProcess child("with_other_settings", {{"RINGCOMM_EMULATOR_DEVICES", "3"},
                                             {"CUDA_VISIBLE_DEVICES", "2,0,9,1"},
                                             {"RINGCOMM_EMULATOR_SMS", "5"},
                                             {"RINGCOMM_EMULATOR_BLOCKS_PER_SM", "3"},
                                             {"RINGCOMM_EMULATOR_VMM", "0"},
                                             {"RINGCOMM_EMULATOR_MPS", "0"},
                                             {"RINGCOMM_EMULATOR_PEER_ACCESS", "0"}});
  CHECK(from_message<char>(child.receive()) == 2);
  CHECK(child.wait() == 0);
}

RINGCOMM_CHILD(without_devices) {
  std::string reason;
  MUST(!has_driver(&reason));
  MUST(reason.find("no CUDA-capable device") != reason.npos);
}

RINGCOMM_CHILD(that_starts) { driver(); }

TEST_CASE("no GPU is said so, and a setting that means nothing ends the process") {
  ChildProcess none("without_devices", {{"RINGCOMM_EMULATOR_DEVICES", "0"}});
  CHECK(none.wait() == 0);
  ChildProcess hidden("without_devices", {{"CUDA_VISIBLE_DEVICES", ""}});
  CHECK(hidden.wait() == 0);
  for (const char* value : {"two", "-1", "1x"}) {
    ChildProcess wrong("that_starts", {{"RINGCOMM_EMULATOR_SMS", value}});
    CHECK(wrong.wait() == -SIGABRT);
  }
}

TEST_CASE("each thread has a current context of its own") {
  const Context context = use_device(1);
  Context found = nullptr;
  std::thread([&] {
    CHECK(driver().ctx_get_current(&found) == kSuccess);
    CHECK(found == nullptr);
    CHECK(driver().ctx_set_current(context) == kSuccess);
    DevicePtr address = 0;
    CHECK(driver().mem_alloc(&address, 100) == kSuccess);
    CHECK(driver().mem_free(address) == kSuccess);
    CHECK(driver().ctx_set_current(nullptr) == kSuccess);
    CHECK(driver().mem_alloc(&address, 100) == kInvalidContext);
  }).join();
  CHECK(driver().ctx_get_current(&found) == kSuccess);
  CHECK(found == context);
  Context again = nullptr;
  CHECK(driver().device_primary_ctx_retain(&again, 1) == kSuccess);
  CHECK(again == context);
  CHECK(driver().ctx_set_current(reinterpret_cast<Context>(&found)) == kInvalidContext);
}

TEST_CASE("peer access is enabled once, and never to the device itself") {
  const Context other = use_device(1);
  const Context context = use_device(0);
  int value = -1;
  CHECK(driver().device_can_access_peer(&value, 0, 1) == kSuccess);
  CHECK(value == 1);
  CHECK(driver().device_can_access_peer(&value, 1, 1) == kSuccess);
  CHECK(value == 0);
  CHECK(driver().ctx_enable_peer_access(context, 0) == kInvalidContext);
  CHECK(driver().ctx_enable_peer_access(other, 1) == kInvalidValue);
  CHECK(driver().ctx_enable_peer_access(other, 0) == kSuccess);
  CHECK(driver().ctx_enable_peer_access(other, 0) == kErrorPeerAccessAlreadyEnabled);
}

TEST_CASE("errors have names and words") {
  const char* text = nullptr;
  CHECK(driver().get_error_name(0, &text) == kSuccess);
  CHECK(std::string(text) == "CUDA_SUCCESS");
  CHECK(driver().get_error_name(kErrorNotReady, &text) == kSuccess);
  CHECK(std::string(text) == "CUDA_ERROR_NOT_READY");
  CHECK(driver().get_error_string(kErrorOutOfMemory, &text) == kSuccess);
  CHECK(std::string(text) == "out of memory");
  CHECK(driver().get_error_string(12345, &text) == kInvalidValue);
  CHECK(text == nullptr);
}

TEST_CASE("a child that was forked after cuInit has no driver") {
  driver();
  const pid_t pid = fork();
  if (pid == 0) {
    int count = 0;
    const bool refused =
        driver().device_get_count(&count) == kNotInitialized && driver().init(0) == kNotInitialized;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
}

}  // namespace
