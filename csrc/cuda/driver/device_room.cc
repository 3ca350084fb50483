#include "cuda/driver/device_room.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>

#include "core/errors.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {
namespace {

constexpr int kDoor = 1 << 20;  // a byte after all seats
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

// Those of this process.
struct Rooms {
  std::mutex mutex;
  std::set<const DeviceRoom*> all;
};

Rooms& open_rooms() {
  static auto& rooms = *new Rooms();
  return rooms;
}

}  // namespace

DeviceRoom::DeviceRoom(const DeviceUuid& device, int num_seats)
    : path_(path_of(device)),
      num_seats_(num_seats),
      has_taken_(static_cast<std::size_t>(num_seats)) {
  // Every process that uses the file holds a read lock on the door. The last one can get the write
  // lock, and removes the file.
  const auto deadline = std::chrono::steady_clock::now() + kDoorPatience;
  do {
    open_file();
    if (lock(kDoor, F_RDLCK) && is_current()) {
      join();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it is being removed
  } while (std::chrono::steady_clock::now() < deadline);
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + path_ + " is locked; remove it");
}

// If the others had another file, seats would be counted twice.
void DeviceRoom::join() {
  const std::lock_guard guard(open_rooms().mutex);
  for (const DeviceRoom* other : open_rooms().all)
    if (other->path_ == path_ && !other->is_current())
      throw Error({.kind = ErrorKind::kSystem},
                  "ringcomm: " + path_ +
                      " was removed while groups of this process used it; destroy those groups");
  open_rooms().all.insert(this);
}

DeviceRoom::~DeviceRoom() {
  try {
    {
      const std::lock_guard guard(open_rooms().mutex);
      open_rooms().all.erase(this);
    }
    give_all_back();
    if (lock(kDoor, F_WRLCK) && is_current()) ::unlink(path_.c_str());
    lock(kDoor, F_UNLCK);  // a forked child may also hold the file
  } catch (const Error&) {
    // The locks go with the file.
  }
}

void DeviceRoom::open_file() {
  file_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file_) shm::throw_errno("open of " + path_ + ", which processes that share a GPU use,");
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
    // Locks of this object itself are not a conflict.
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

// One process at a time: an attempt that fails must not make another one fail.
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
