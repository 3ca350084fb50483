#include "transport/cuda/device_room.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>

#include "core/errors.h"
#include "transport/shm/system_error.h"

namespace ringcomm::cuda {
namespace {

constexpr int kDoor = 1 << 20;  // a byte behind all seats
constexpr int kDesk = kDoor + 1;
constexpr std::chrono::seconds kDoorPatience{5};

std::string path_of(const DeviceUuid& device) {
  std::string path = "/dev/shm/ringcomm-gpu-" + std::to_string(::geteuid()) + "-";
  for (const char byte : device.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    path += digits;
  }
  return path;
}

struct flock lock_of(int byte, short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

DeviceRoom::DeviceRoom(const DeviceUuid& device, int num_seats)
    : path_(path_of(device)),
      num_seats_(num_seats),
      has_taken_(static_cast<std::size_t>(num_seats)) {
  // Who has the file's door open for reading uses the file; the last one to leave can close it.
  const auto deadline = std::chrono::steady_clock::now() + kDoorPatience;
  do {
    open_file();
    if (lock(kDoor, F_RDLCK) && is_current()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it is being removed
  } while (std::chrono::steady_clock::now() < deadline);
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + path_ + " is locked; remove it");
}

DeviceRoom::~DeviceRoom() {
  try {
    give_all_back();
    if (lock(kDoor, F_WRLCK) && is_current()) ::unlink(path_.c_str());
    lock(kDoor, F_UNLCK);  // a forked child may have the file, too
  } catch (const Error&) {
    // The locks go with the file.
  }
}

void DeviceRoom::open_file() {
  file_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file_) shm::throw_errno("open " + path_ + ", by which processes share a GPU,");
  struct stat status = {};
  if (::fstat(file_.get(), &status) != 0) shm::throw_errno("fstat");
  if (status.st_uid != ::geteuid())
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + path_ + " belongs to user " +
                                                  std::to_string(status.st_uid) + "; remove it");
}

bool DeviceRoom::is_current() const {
  struct stat opened = {};
  struct stat named = {};
  return ::fstat(file_.get(), &opened) == 0 && ::lstat(path_.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

int DeviceRoom::num_free() const {
  int num_free = 0;
  for (int seat = 0; seat < num_seats_; ++seat) {
    struct flock probe = lock_of(seat, F_WRLCK);
    if (::fcntl(file_.get(), F_OFD_GETLK, &probe) != 0) shm::throw_errno("look at a file's locks");
    // What this object has locked itself is no conflict.
    if (probe.l_type == F_UNLCK && !has_taken_[static_cast<std::size_t>(seat)]) ++num_free;
  }
  return num_free;
}

bool DeviceRoom::lock(int byte, short type) {
  struct flock one = lock_of(byte, type);
  if (::fcntl(file_.get(), F_OFD_SETLK, &one) == 0) return true;
  if (errno != EAGAIN && errno != EACCES) shm::throw_errno("lock a file");
  return false;
}

// One at a time: what another tries to take, and cannot, must refuse nobody.
bool DeviceRoom::take(int num_wanted) {
  const auto deadline = std::chrono::steady_clock::now() + kDoorPatience;
  while (!lock(kDesk, F_WRLCK)) {
    if (std::chrono::steady_clock::now() >= deadline) return false;  // its process has stopped
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  const bool is_enough = take_at_desk(num_wanted);
  lock(kDesk, F_UNLCK);
  return is_enough;
}

bool DeviceRoom::take_at_desk(int num_wanted) {
  std::vector<int> taken;
  for (int seat = 0; seat < num_seats_ && static_cast<int>(taken.size()) < num_wanted; ++seat)
    if (!has_taken_[static_cast<std::size_t>(seat)] && lock(seat, F_WRLCK)) taken.push_back(seat);
  const bool is_enough = static_cast<int>(taken.size()) == num_wanted;
  for (const int seat : taken)
    is_enough ? has_taken_[static_cast<std::size_t>(seat)] = true : lock(seat, F_UNLCK);
  return is_enough;
}

void DeviceRoom::give_all_back() {
  for (int seat = 0; seat < num_seats_; ++seat)
    if (has_taken_[static_cast<std::size_t>(seat)]) lock(seat, F_UNLCK);
  has_taken_.assign(has_taken_.size(), false);
}

}  // namespace ringcomm::cuda
