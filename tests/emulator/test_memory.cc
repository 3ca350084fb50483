// cuMemAlloc, cuMemHostAlloc, copies and fills.
#include <csignal>
#include <numeric>
#include <string>
#include <vector>

#include "emulator/child_process.h"
#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

TEST_CASE("memory is zeroed, aligned, found by any address in it, and counted") {
  use_device(0);
  std::size_t free_before = 0;
  std::size_t total = 0;
  REQUIRE(driver().mem_get_info(&free_before, &total) == kSuccess);
  DevicePtr address = 0;
  REQUIRE(driver().mem_alloc(&address, 10'001) == kSuccess);
  CHECK(address % 512 == 0);
  CHECK(values(elems_at(address), 2500) == std::vector<std::int32_t>(2500, 0));
  std::size_t free_after = 0;
  REQUIRE(driver().mem_get_info(&free_after, &total) == kSuccess);
  CHECK(free_before - free_after == 10'001);
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  CHECK(driver().mem_get_address_range(&base, &num_bytes, address + 10'000) == kSuccess);
  CHECK(base == address);
  CHECK(num_bytes == 10'001);
  CHECK(driver().mem_get_address_range(nullptr, &num_bytes, address) == kSuccess);
  CHECK(driver().mem_get_address_range(&base, &num_bytes, address + 10'001) == kNotFound);
  CHECK(driver().mem_free(address + 1) == kInvalidValue);
  CHECK(driver().mem_free(address) == kSuccess);
  CHECK(driver().mem_free(address) == kInvalidValue);
  CHECK(driver().mem_free(0) == kSuccess);
  CHECK(driver().mem_get_address_range(&base, &num_bytes, address) == kNotFound);
  REQUIRE(driver().mem_get_info(&free_after, &total) == kSuccess);
  CHECK(free_before == free_after);
  CHECK(driver().mem_alloc(&address, 0) == kInvalidValue);
  CHECK(driver().mem_alloc(nullptr, 1) == kInvalidValue);
}

RINGCOMM_CHILD(with_little_memory) {
  use_device(0);
  constexpr std::size_t kBytes = 4 << 20;
  DevicePtr first = 0;
  DevicePtr second = 0;
  MUST(driver().mem_alloc(&first, kBytes + 1) == kErrorOutOfMemory);
  MUST(driver().mem_alloc(&first, kBytes / 2) == kSuccess);
  MUST(driver().mem_alloc(&second, kBytes / 2 + 1) == kErrorOutOfMemory);
  MemoryHandle handle = 0;
  const MemAllocationProp prop = shareable_on(0);
  MUST(driver().mem_create(&handle, kBytes / 2, &prop, 0) == kSuccess);
  MUST(driver().mem_alloc(&second, 1) == kErrorOutOfMemory);
  use_device(1);  // which has memory of its own
  MUST(driver().mem_alloc(&second, kBytes) == kSuccess);
  use_device(0);
  MUST(driver().mem_release(handle) == kSuccess);
  MUST(driver().mem_alloc(&second, kBytes / 2) == kSuccess);
}

TEST_CASE("a GPU's memory ends") {
  ChildProcess child("with_little_memory",
                     {{"RINGCOMM_EMULATOR_MEMORY", "4194304"}, {"RINGCOMM_EMULATOR_DEVICES", "2"}});
  CHECK(child.wait() == 0);
}

RINGCOMM_CHILD(that_leaves_its_memory) {
  use_device(0);
  *reinterpret_cast<volatile char*>(address_of(zeros(1024)) + 4096) = 1;
}

RINGCOMM_CHILD(that_uses_freed_memory) {
  use_device(0);
  std::int32_t* data = zeros(1);
  MUST(driver().mem_free(address_of(data)) == kSuccess);
  *static_cast<volatile std::int32_t*>(data) = 1;
}

TEST_CASE("what is behind memory, or no longer memory, faults") {
  for (const char* function : {"that_leaves_its_memory", "that_uses_freed_memory"}) {
    ChildProcess child(function);
    CHECK(child.wait() == -SIGSEGV);
  }
}

TEST_CASE("host memory is the device's too") {
  use_device(0);
  void* host = nullptr;
  REQUIRE(driver().mem_host_alloc(&host, 1000, kHostPortable | kHostDeviceMap) == kSuccess);
  DevicePtr device = 0;
  REQUIRE(driver().mem_host_get_device_pointer(&device, static_cast<char*>(host) + 8, 0) ==
          kSuccess);
  const StreamHandle stream = new_stream();
  REQUIRE(launch("toy_add", ToyAdd{elems_at(device), 10, 3}, stream) == kSuccess);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  CHECK(static_cast<std::int32_t*>(host)[1] == 0);
  CHECK(static_cast<std::int32_t*>(host)[2] == 3);
  CHECK(static_cast<std::int32_t*>(host)[11] == 3);
  CHECK(driver().mem_host_get_device_pointer(&device, &device, 0) == kInvalidValue);
  CHECK(driver().mem_host_get_device_pointer(&device, zeros(1), 0) == kInvalidValue);
  CHECK(driver().mem_free(address_of(host)) == kInvalidValue);
  CHECK(driver().mem_free_host(host) == kSuccess);
  CHECK(driver().mem_free_host(host) == kInvalidValue);
  CHECK(driver().mem_host_alloc(&host, 0, 0) == kInvalidValue);
  CHECK(driver().mem_host_alloc(&host, 1, 8) == kInvalidValue);
}

TEST_CASE("copies and fills are work of a stream") {
  use_device(0);
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(1000);
  std::int32_t* copy = zeros(1000);
  std::uint32_t* go = flag();
  REQUIRE(launch("toy_await", ToyAwait{go, 1, 30'000, nullptr, nullptr}, stream) == kSuccess);
  REQUIRE(launch("toy_add", ToyAdd{data, 1000, 5}, stream) == kSuccess);
  REQUIRE(driver().memcpy_async(address_of(copy), address_of(data), 4000, stream) == kSuccess);
  REQUIRE(driver().memset_d8_async(address_of(data), 0x01, 2000, stream) == kSuccess);
  CHECK(values(copy, 1000) == std::vector<std::int32_t>(1000, 0));
  set(go, 1);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  CHECK(values(copy, 1000) == std::vector<std::int32_t>(1000, 5));
  CHECK(values(data, 500) == std::vector<std::int32_t>(500, 0x01010101));
  CHECK(values(data + 500, 500) == std::vector<std::int32_t>(500, 5));
}

TEST_CASE("a copy from pageable memory has it when the call returns") {
  use_device(0);
  std::vector<std::int32_t> host(5000);
  std::iota(host.begin(), host.end(), 1);
  const std::vector<std::int32_t> as_it_was = host;
  const StreamHandle stream = new_stream();
  std::int32_t* data = zeros(5000);
  REQUIRE(driver().memcpy_async(address_of(data), address_of(host.data()), 20'000, stream) ==
          kSuccess);
  host.assign(5000, -1);
  CHECK(values(data, 5000) == as_it_was);
}

TEST_CASE("copies and fills stay within what was allocated") {
  use_device(0);
  const DevicePtr data = address_of(zeros(100));
  const DevicePtr other = address_of(zeros(1000));
  char pageable[500];
  CHECK(driver().memset_d8_async(data, 0, 401, nullptr) == kInvalidValue);
  CHECK(driver().memset_d8_async(data + 1, 0, 399, nullptr) == kSuccess);
  CHECK(driver().memset_d8_async(address_of(pageable), 0, 1, nullptr) == kInvalidValue);
  CHECK(driver().memcpy_async(data, other, 401, nullptr) == kInvalidValue);
  CHECK(driver().memcpy_async(other, data, 401, nullptr) == kInvalidValue);
  CHECK(driver().memcpy_async(data, address_of(pageable), 401, nullptr) == kInvalidValue);
  CHECK(driver().memcpy_async(data, 0, 1, nullptr) == kInvalidValue);
  CHECK(driver().memcpy_async(data, 0, 0, nullptr) == kSuccess);
  CHECK(driver().memcpy_async(data, other, 400, nullptr) == kSuccess);
  REQUIRE(driver().stream_synchronize(nullptr) == kSuccess);
}

}  // namespace
