// Seats for blocks that wait on a GPU, which groups of all processes share.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <future>
#include <memory>
#include <string>

#include "core/errors.h"
#include "cuda/driver/device_room.h"
#include "third_party/doctest/doctest.h"

namespace {

using ringcomm::cuda::DeviceRoom;
using ringcomm::cuda::DeviceUuid;

// A GPU of this process's own, so that no other test has it.
DeviceUuid own_device(char number) {
  DeviceUuid device = {};
  const pid_t pid = ::getpid();
  std::memcpy(device.bytes, &pid, sizeof pid);
  device.bytes[15] = number;
  return device;
}

std::string path_of(const DeviceUuid& device) {
  std::string path = "/dev/shm/ringcomm-gpu-" + std::to_string(::geteuid()) + "-";
  constexpr const char* kDigits = "0123456789abcdef";
  for (const char byte : device.bytes) {
    path += kDigits[static_cast<unsigned char>(byte) >> 4];
    path += kDigits[byte & 15];
  }
  return path;
}

TEST_CASE("device room: a taken seat is refused to others, and a released one is free again") {
  const DeviceUuid device = own_device(1);
  auto first = std::make_unique<DeviceRoom>(device, 7);
  DeviceRoom second(device, 7);
  CHECK(first->take(4));
  CHECK(second.num_free() == 3);
  CHECK(first->num_free() == 3);
  CHECK(!second.take(4));
  CHECK(second.num_free() == 3);  // none, if not all
  CHECK(second.take(2));
  CHECK(second.take(1));
  CHECK(!first->take(1));
  CHECK(DeviceRoom(own_device(2), 7).num_free() == 7);
  first.reset();
  CHECK(second.num_free() == 4);
  second.give_all_back();
  CHECK(second.take(7));
}

// Otherwise two processes that each take more than half at the same time would both fail, although
// there is room for one.
TEST_CASE("device room: one takes at a time") {
  const DeviceUuid device = own_device(4);
  DeviceRoom room(device, 7);
  const int other = ::open(path_of(device).c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(other >= 0);
  struct flock desk = {};
  desk.l_type = F_WRLCK;
  desk.l_start = (1 << 20) + 1;
  desk.l_len = 1;
  REQUIRE(::fcntl(other, F_OFD_SETLK, &desk) == 0);
  std::future<bool> taken = std::async(std::launch::async, [&] { return room.take(4); });
  CHECK(taken.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  ::close(other);
  CHECK(taken.get());
}

TEST_CASE("device room: a killed process has nothing, and the last one leaves no file") {
  const DeviceUuid device = own_device(3);
  {
    DeviceRoom room(device, 5);
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      DeviceRoom theirs(device, 5);
      const char has_taken = theirs.take(5) ? 1 : 0;
      if (::write(ready[1], &has_taken, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    REQUIRE(child > 0);
    char has_taken = 0;
    REQUIRE(::read(ready[0], &has_taken, 1) == 1);
    CHECK(has_taken == 1);
    CHECK(room.num_free() == 0);
    CHECK(!room.take(1));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    CHECK(room.take(5));
    struct stat status = {};
    CHECK(::stat(path_of(device).c_str(), &status) == 0);
  }
  struct stat status = {};
  CHECK(::stat(path_of(device).c_str(), &status) != 0);
}

TEST_CASE("device room: a removed file is not replaced while rooms of the process use it") {
  const DeviceUuid device = own_device(5);
  const std::string path = path_of(device);
  {
    DeviceRoom room(device, 5);
    REQUIRE(room.take(4));
    REQUIRE(::unlink(path.c_str()) == 0);
    CHECK_THROWS_WITH_AS(DeviceRoom(device, 5), doctest::Contains("was removed while groups"),
                         ringcomm::Error);
    CHECK_THROWS_AS(DeviceRoom(device, 5), ringcomm::Error);  // nor later
  }
  CHECK(DeviceRoom(device, 5).num_free() == 5);
  struct stat status = {};
  CHECK(::stat(path.c_str(), &status) != 0);
}

}  // namespace
