#include "cuda/driver/block_reservation.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>

#include "core/errors.h"
#include "host/process.h"

namespace ringcomm::cuda {
namespace {

// Bytes after all places.
constexpr int kInUse = 1 << 20;     // read-locked by every process that uses the file
constexpr int kMutex = kInUse + 1;  // locked by the one that reserves
constexpr std::chrono::seconds kPatience{5};

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
struct Reservations {
  std::mutex mutex;
  std::set<BlockReservation*> all;
};

Reservations& reservations() {
  static auto& all = *new Reservations();
  return all;
}

}  // namespace

// Locks belong to the open file, and a fork shares it: a child that outlives this process would
// keep its places.
void BlockReservation::close_in_children() {
  ::pthread_atfork([] { reservations().mutex.lock(); }, [] { reservations().mutex.unlock(); },
                   [] {
                     for (BlockReservation* each : reservations().all) each->file_.reset();
                     reservations().all.clear();
                     reservations().mutex.unlock();
                   });
}

BlockReservation::BlockReservation(const DeviceUuid& device, int capacity)
    : path_(path_of(device)), is_reserved_(static_cast<std::size_t>(capacity)) {
  // The last process can get the write lock of kInUse, and removes the file.
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  do {
    open_file();
    if (!has_locks()) {
      file_.reset();
      return;
    }
    if (lock(kInUse, F_RDLCK) && is_current()) {
      check_same_file();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it is being removed
  } while (std::chrono::steady_clock::now() < deadline);
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + path_ + " is locked; remove it");
}

// If the others of this process had another file, places would be counted twice.
void BlockReservation::check_same_file() {
  const std::lock_guard guard(reservations().mutex);
  [[maybe_unused]] static const bool is_registered = (close_in_children(), true);
  for (const BlockReservation* other : reservations().all)
    if (other->path_ == path_ && !other->is_current())
      throw Error({.kind = ErrorKind::kSystem},
                  "ringcomm: " + path_ +
                      " was removed while groups of this process used it; destroy those groups");
  reservations().all.insert(this);
}

BlockReservation::~BlockReservation() {
  try {
    {
      const std::lock_guard guard(reservations().mutex);
      reservations().all.erase(this);
    }
    release_all();
    if (!is_shared()) return;
    if (lock(kInUse, F_WRLCK) && is_current()) ::unlink(path_.c_str());
    lock(kInUse, F_UNLCK);  // a forked child may also hold the file
  } catch (const Error&) {
    // The locks go with the file.
  }
}

void BlockReservation::open_file() {
  file_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file_) host::throw_errno("open of " + path_ + ", which processes that share a GPU use,");
  struct stat status = {};
  if (::fstat(file_.get(), &status) != 0) host::throw_errno("fstat");
  if (status.st_uid != ::geteuid())
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + path_ + " belongs to user " +
                                                  std::to_string(status.st_uid) + "; remove it");
}

bool BlockReservation::has_locks() const {
  struct flock probe = lock_of(kMutex, F_WRLCK);
  return ::fcntl(file_.get(), F_OFD_GETLK, &probe) == 0 || errno != EINVAL;
}

bool BlockReservation::is_current() const {
  struct stat opened = {};
  struct stat named = {};
  return ::fstat(file_.get(), &opened) == 0 && ::lstat(path_.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

int BlockReservation::num_free() const {
  int num_free = 0;
  for (int place = 0; place < capacity(); ++place) {
    const bool is_own = is_reserved_[static_cast<std::size_t>(place)];
    if (!is_shared()) {
      num_free += is_own ? 0 : 1;
      continue;
    }
    struct flock probe = lock_of(place, F_WRLCK);
    if (::fcntl(file_.get(), F_OFD_GETLK, &probe) != 0) host::throw_errno("look at a file's locks");
    // Locks of this object itself are not a conflict.
    if (probe.l_type == F_UNLCK && !is_own) ++num_free;
  }
  return num_free;
}

bool BlockReservation::lock(int byte, short type) {
  if (!is_shared()) return true;
  struct flock one = lock_of(byte, type);
  if (::fcntl(file_.get(), F_OFD_SETLK, &one) == 0) return true;
  if (errno != EAGAIN && errno != EACCES) host::throw_errno("lock a file");
  return false;
}

// One process at a time: an attempt that fails must not make another one fail.
bool BlockReservation::reserve(int num_places) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!lock(kMutex, F_WRLCK)) {
    if (std::chrono::steady_clock::now() >= deadline) return false;  // its process has stopped
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::vector<std::size_t> taken;
  for (std::size_t i = 0; i < is_reserved_.size() && std::ssize(taken) < num_places; ++i)
    if (!is_reserved_[i] && lock(static_cast<int>(i), F_WRLCK)) taken.push_back(i);
  const bool is_enough = std::ssize(taken) == num_places;
  for (const std::size_t i : taken)
    is_enough ? is_reserved_[i] = true : lock(static_cast<int>(i), F_UNLCK);
  lock(kMutex, F_UNLCK);
  return is_enough;
}

void BlockReservation::release_all() {
  for (std::size_t i = 0; i < is_reserved_.size(); ++i)
    if (is_reserved_[i]) lock(static_cast<int>(i), F_UNLCK);
  is_reserved_.assign(is_reserved_.size(), false);
}

}  // namespace ringcomm::cuda
