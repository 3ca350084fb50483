// Physical memory apart from addresses, in one process and in two.
#include <unistd.h>

#include <csignal>
#include <vector>

#include "emulator/child_process.h"
#include "emulator/testing.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::emulator;
using namespace ringcomm::emulator::testing;

constexpr std::size_t kGranule = std::size_t{2} << 20;

MemoryHandle create(std::size_t num_bytes, DeviceOrdinal device = 0) {
  const MemAllocationProp prop = shareable_on(device);
  MemoryHandle handle = 0;
  check(driver().mem_create(&handle, num_bytes, &prop, 0), "create memory");
  return handle;
}

DevicePtr reserve(std::size_t num_bytes, std::size_t alignment = 0) {
  DevicePtr address = 0;
  check(driver().mem_address_reserve(&address, num_bytes, alignment, 0, 0), "reserve");
  return address;
}

Result give_access(DevicePtr address, std::size_t num_bytes, DeviceOrdinal device = 0,
                   int flags = kAccessReadWrite) {
  const MemAccessDesc access = {{kLocationDevice, device}, flags};
  return driver().mem_set_access(address, num_bytes, &access, 1);
}

/// An address of the memory, which all may use.
DevicePtr map(MemoryHandle handle, std::size_t num_bytes) {
  const DevicePtr address = reserve(num_bytes);
  check(driver().mem_map(address, num_bytes, 0, handle, 0), "map");
  check(give_access(address, num_bytes), "give access");
  return address;
}

TEST_CASE("sizes and addresses go by granules") {
  const MemAllocationProp prop = shareable_on(0);
  std::size_t granularity = 0;
  REQUIRE(driver().mem_get_allocation_granularity(&granularity, &prop, kGranularityMinimum) ==
          kSuccess);
  CHECK(granularity == kGranule);
  MemoryHandle handle = 0;
  CHECK(driver().mem_create(&handle, kGranule + 4096, &prop, 0) == kInvalidValue);
  CHECK(driver().mem_create(&handle, 0, &prop, 0) == kInvalidValue);
  MemAllocationProp wrong = prop;
  wrong.type = 0;
  CHECK(driver().mem_create(&handle, kGranule, &wrong, 0) == kInvalidValue);
  wrong = prop;
  wrong.location.id = 5;
  CHECK(driver().mem_create(&handle, kGranule, &wrong, 0) == kInvalidDevice);
  DevicePtr address = 0;
  CHECK(driver().mem_address_reserve(&address, kGranule / 2, 0, 0, 0) == kInvalidValue);
  CHECK(driver().mem_address_reserve(&address, kGranule, 3, 0, 0) == kInvalidValue);
  address = reserve(3 * kGranule, 8 * kGranule);
  CHECK(address % (8 * kGranule) == 0);
  CHECK(driver().mem_address_free(address, kGranule) == kInvalidValue);
  CHECK(driver().mem_address_free(address, 3 * kGranule) == kSuccess);
  CHECK(driver().mem_address_free(address, 3 * kGranule) == kInvalidValue);
}

TEST_CASE("memory is mapped twice, and lives while it is mapped") {
  use_device(0);
  const MemoryHandle handle = create(2 * kGranule);
  const DevicePtr first = map(handle, 2 * kGranule);
  const DevicePtr second = map(handle, 2 * kGranule);
  CHECK(driver().mem_release(handle) == kSuccess);
  CHECK(driver().mem_release(handle) == kInvalidValue);
  const StreamHandle stream = new_stream();
  const std::size_t num_elems = 2 * kGranule / sizeof(std::int32_t);
  REQUIRE(launch("toy_add", ToyAdd{elems_at(first), static_cast<std::int64_t>(num_elems), 4},
                 stream, 4) == kSuccess);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  CHECK(values(elems_at(second), num_elems) == std::vector<std::int32_t>(num_elems, 4));
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  CHECK(driver().mem_get_address_range(&base, &num_bytes, first + 5) == kSuccess);
  CHECK(base == first);
  CHECK(num_bytes == 2 * kGranule);
  std::size_t free_before = 0;
  std::size_t free_after = 0;
  std::size_t total = 0;
  REQUIRE(driver().mem_get_info(&free_before, &total) == kSuccess);
  CHECK(driver().mem_unmap(first, 2 * kGranule) == kSuccess);
  CHECK(driver().mem_unmap(first, 2 * kGranule) == kInvalidValue);
  CHECK(driver().mem_unmap(second, 2 * kGranule) == kSuccess);
  REQUIRE(driver().mem_get_info(&free_after, &total) == kSuccess);
  CHECK(free_after - free_before == 2 * kGranule);
  CHECK(driver().mem_address_free(first, 2 * kGranule) == kSuccess);
}

TEST_CASE("several memories side by side are one range") {
  use_device(0);
  const DevicePtr address = reserve(3 * kGranule);
  for (int i = 0; i < 2; ++i) {
    const MemoryHandle handle = create(kGranule);
    const DevicePtr at = address + static_cast<DevicePtr>(i) * kGranule;
    REQUIRE(driver().mem_map(at, kGranule, 0, handle, 0) == kSuccess);
    CHECK(driver().mem_map(at, kGranule, 0, handle, 0) == kAlreadyMapped);
    CHECK(driver().mem_release(handle) == kSuccess);
  }
  CHECK(driver().memset_d8_async(address, 1, 2 * kGranule, nullptr) == kInvalidValue);
  CHECK(give_access(address, 3 * kGranule) == kInvalidValue);  // the third is not mapped
  CHECK(give_access(address, 2 * kGranule) == kSuccess);
  CHECK(driver().memset_d8_async(address, 1, 2 * kGranule, nullptr) == kSuccess);
  CHECK(driver().memset_d8_async(address, 1, 2 * kGranule + 1, nullptr) == kInvalidValue);
  CHECK(driver().stream_synchronize(nullptr) == kSuccess);
  CHECK(give_access(address, kGranule, 0, 1) == kSuccess);  // reading alone
  CHECK(driver().memset_d8_async(address, 1, 1, nullptr) == kInvalidValue);
  CHECK(driver().mem_address_free(address, 3 * kGranule) == kInvalidValue);  // still mapped
  CHECK(driver().mem_unmap(address, 2 * kGranule) == kSuccess);
  CHECK(driver().mem_address_free(address, 3 * kGranule) == kSuccess);
}

TEST_CASE("arguments of mappings are checked") {
  const MemoryHandle handle = create(kGranule);
  const DevicePtr address = reserve(2 * kGranule);
  CHECK(driver().mem_map(address, 2 * kGranule, 0, handle, 0) == kInvalidValue);
  CHECK(driver().mem_map(address + 4096, kGranule, 0, handle, 0) == kInvalidValue);
  CHECK(driver().mem_map(address + 2 * kGranule, kGranule, 0, handle, 0) == kInvalidValue);
  CHECK(driver().mem_map(address, kGranule, 0, handle + 1000, 0) == kInvalidValue);
  REQUIRE(driver().mem_map(address, kGranule, 0, handle, 0) == kSuccess);
  CHECK(give_access(address, kGranule, 9) == kInvalidDevice);
  CHECK(give_access(address, kGranule, 0, 7) == kInvalidValue);
  CHECK(give_access(address, kGranule, 1) == kSuccess);  // a peer
  int fd = -1;
  CHECK(driver().mem_export_to_shareable_handle(&fd, handle, 2, 0) == kInvalidValue);
  MemAllocationProp prop = shareable_on(0);
  prop.requested_handle_types = 0;
  MemoryHandle hidden = 0;
  REQUIRE(driver().mem_create(&hidden, kGranule, &prop, 0) == kSuccess);
  CHECK(driver().mem_export_to_shareable_handle(&fd, hidden, kHandlePosixFd, 0) == kInvalidValue);
  MemoryHandle imported = 0;
  CHECK(driver().mem_import_from_shareable_handle(&imported, nullptr, kHandlePosixFd) ==
        kInvalidValue);  // descriptor 0 is no memory of a GPU
}

RINGCOMM_CHILD(that_has_no_access) {
  const DevicePtr address = reserve(kGranule);
  MUST(driver().mem_map(address, kGranule, 0, create(kGranule), 0) == kSuccess);
  *reinterpret_cast<volatile char*>(address);
}

RINGCOMM_CHILD(that_may_only_read) {
  const DevicePtr address = map(create(kGranule), kGranule);
  MUST(give_access(address, kGranule, 0, 1) == kSuccess);
  MUST(*reinterpret_cast<volatile char*>(address) == 0);
  *reinterpret_cast<volatile char*>(address) = 1;
}

RINGCOMM_CHILD(that_reads_what_was_unmapped) {
  const DevicePtr address = map(create(kGranule), kGranule);
  MUST(*reinterpret_cast<volatile char*>(address) == 0);
  MUST(driver().mem_unmap(address, kGranule) == kSuccess);
  *reinterpret_cast<volatile char*>(address);
}

RINGCOMM_CHILD(that_reads_what_is_reserved) {
  *reinterpret_cast<volatile char*>(reserve(kGranule));
}

TEST_CASE("memory without access, or that is not mapped, faults") {
  for (const char* function : {"that_has_no_access", "that_may_only_read",
                               "that_reads_what_was_unmapped", "that_reads_what_is_reserved"}) {
    ChildProcess child(function);
    CHECK(child.wait() == -SIGSEGV);
  }
}

RINGCOMM_CHILD(that_maps_a_descriptor) {
  use_device(0);
  int fd = -1;
  receive_from_parent(&fd);
  MemoryHandle handle = 0;
  MUST(driver().mem_import_from_shareable_handle(
           &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)), kHandlePosixFd) ==
       kSuccess);
  close(fd);
  const DevicePtr address = map(handle, kGranule);
  MUST(driver().mem_release(handle) == kSuccess);
  MUST(values(elems_at(address), 100) == std::vector<std::int32_t>(100, 6));
  const StreamHandle stream = new_stream();
  MUST(launch("toy_scale", ToyScale{elems_at(address), 100, 7}, stream) == kSuccess);
  MUST(driver().stream_synchronize(stream) == kSuccess);
  std::size_t num_free = 0;
  std::size_t total = 0;
  MUST(driver().mem_get_info(&num_free, &total) == kSuccess);
  MUST(num_free == total);  // others' memory counts against them
}

TEST_CASE("memory travels between processes as a descriptor, also where there is no cuIpc") {
  use_device(0);
  const MemoryHandle handle = create(kGranule);
  const DevicePtr address = map(handle, kGranule);
  const StreamHandle stream = new_stream();
  REQUIRE(launch("toy_add", ToyAdd{elems_at(address), 100, 6}, stream) == kSuccess);
  REQUIRE(driver().stream_synchronize(stream) == kSuccess);
  int fd = -1;
  REQUIRE(driver().mem_export_to_shareable_handle(&fd, handle, kHandlePosixFd, 0) == kSuccess);
  ChildProcess child("that_maps_a_descriptor", {{"RINGCOMM_EMULATOR_IPC", "0"}});
  child.send({}, fd);
  close(fd);
  CHECK(child.wait() == 0);
  CHECK(values(elems_at(address), 100) == std::vector<std::int32_t>(100, 42));
}

RINGCOMM_CHILD(without_vmm) {
  const MemAllocationProp prop = shareable_on(0);
  MemoryHandle handle = 0;
  DevicePtr address = 0;
  MUST(driver().mem_create(&handle, kGranule, &prop, 0) == kNotSupported);
  MUST(driver().mem_address_reserve(&address, kGranule, 0, 0, 0) == kNotSupported);
}

RINGCOMM_CHILD(without_peers) {
  const DevicePtr address = map(create(kGranule), kGranule);
  MUST(give_access(address, kGranule, 1) == kInvalidDevice);
}

TEST_CASE("without the feature its calls fail; without peer access a device has its own memory") {
  ChildProcess no_vmm("without_vmm", {{"RINGCOMM_EMULATOR_VMM", "0"}});
  CHECK(no_vmm.wait() == 0);
  ChildProcess no_peers("without_peers", {{"RINGCOMM_EMULATOR_PEER_ACCESS", "0"}});
  CHECK(no_peers.wait() == 0);
}

}  // namespace
