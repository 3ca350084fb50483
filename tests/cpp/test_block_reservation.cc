// Places on a GPU for blocks that wait, which groups of all processes share.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <future>
#include <memory>
#include <string>

#include "children.h"
#include "core/errors.h"
#include "cuda/driver/block_reservation.h"
#include "third_party/doctest/doctest.h"

namespace {

using ringcomm::cuda::BlockReservation;
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

// As in a sandbox that does not know locks of open files.
TEST_CASE("block reservation: without file locks each group counts for itself") {
  CHECK(ringcomm::testing::status_of_child([] {
          if (!ringcomm::testing::refuse_calls(SYS_fcntl, 1, F_OFD_GETLK, F_OFD_SETLKW)) return 2;
          BlockReservation first(own_device(1), 7), second(own_device(1), 7);
          const bool is_right = !first.is_shared() && first.reserve(5) && !first.reserve(3) &&
                                first.num_free() == 2 && second.num_free() == 7 &&
                                second.reserve(7);
          return is_right ? 0 : 1;
        }) == 0);
  CHECK(BlockReservation(own_device(1), 7).is_shared());
}

TEST_CASE(
    "block reservation: a reserved place is refused to others, and a released one is free again") {
  const DeviceUuid device = own_device(1);
  auto first = std::make_unique<BlockReservation>(device, 7);
  BlockReservation second(device, 7);
  CHECK(first->reserve(4));
  CHECK(second.num_free() == 3);
  CHECK(first->num_free() == 3);
  CHECK(!second.reserve(4));
  CHECK(second.num_free() == 3);  // none, if not all
  CHECK(second.reserve(2));
  CHECK(second.reserve(1));
  CHECK(!first->reserve(1));
  CHECK(BlockReservation(own_device(2), 7).num_free() == 7);
  first.reset();
  CHECK(second.num_free() == 4);
  second.release_all();
  CHECK(second.reserve(7));
}

// Otherwise two processes that each reserve more than half at the same time would both fail,
// although there is room for one.
TEST_CASE("block reservation: one process reserves at a time") {
  const DeviceUuid device = own_device(4);
  BlockReservation reservation(device, 7);
  const int other = ::open(path_of(device).c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(other >= 0);
  struct flock mutex = {};
  mutex.l_type = F_WRLCK;
  mutex.l_start = (1 << 20) + 1;
  mutex.l_len = 1;
  REQUIRE(::fcntl(other, F_OFD_SETLK, &mutex) == 0);
  std::future<bool> taken = std::async(std::launch::async, [&] { return reservation.reserve(4); });
  CHECK(taken.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  ::close(other);
  CHECK(taken.get());
}

TEST_CASE("block reservation: a killed process has nothing, and the last one leaves no file") {
  const DeviceUuid device = own_device(3);
  {
    BlockReservation reservation(device, 5);
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      BlockReservation theirs(device, 5);
      const char has_reserved = theirs.reserve(5) ? 1 : 0;
      if (::write(ready[1], &has_reserved, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    REQUIRE(child > 0);
    char has_reserved = 0;
    REQUIRE(::read(ready[0], &has_reserved, 1) == 1);
    CHECK(has_reserved == 1);
    CHECK(reservation.num_free() == 0);
    CHECK(!reservation.reserve(1));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    CHECK(reservation.reserve(5));
    struct stat status = {};
    CHECK(::stat(path_of(device).c_str(), &status) == 0);
  }
  struct stat status = {};
  CHECK(::stat(path_of(device).c_str(), &status) != 0);
}

// https://github.com/NVIDIA/Megatron-LM/pull/3684: a worker that a rank has forked outlives it.
TEST_CASE("block reservation: a forked child keeps nothing of a process that was killed") {
  const DeviceUuid device = own_device(6);
  BlockReservation reservation(device, 5);
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    BlockReservation theirs(device, 5);
    if (!theirs.reserve(5)) ::_exit(1);
    if (::fork() == 0) {  // it tells by itself: then it has let the file go
      const pid_t self = ::getpid();
      if (::write(ready[1], &self, sizeof self) != sizeof self) ::_exit(1);
    }
    for (;;) ::pause();
  }
  REQUIRE(child > 0);
  ::close(ready[1]);
  pid_t orphan = 0;
  REQUIRE(::read(ready[0], &orphan, sizeof orphan) == sizeof orphan);
  CHECK(reservation.num_free() == 0);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  CHECK(reservation.reserve(5));
  ::kill(orphan, SIGKILL);
  ::close(ready[0]);
}

TEST_CASE(
    "block reservation: a removed file is not replaced while reservations of the process use it") {
  const DeviceUuid device = own_device(5);
  const std::string path = path_of(device);
  {
    BlockReservation reservation(device, 5);
    REQUIRE(reservation.reserve(4));
    REQUIRE(::unlink(path.c_str()) == 0);
    CHECK_THROWS_WITH_AS(BlockReservation(device, 5), doctest::Contains("was removed while groups"),
                         ringcomm::Error);
    CHECK_THROWS_AS(BlockReservation(device, 5), ringcomm::Error);  // nor later
  }
  CHECK(BlockReservation(device, 5).num_free() == 5);
  struct stat status = {};
  CHECK(::stat(path.c_str(), &status) != 0);
}

}  // namespace
