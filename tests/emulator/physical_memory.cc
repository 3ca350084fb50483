#include "emulator/physical_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr std::string_view kName = "ringcomm-emulated-gpu-";

struct Budget {
  std::mutex mutex;
  std::map<DeviceOrdinal, std::size_t> used;
};

Budget& budget() {
  static Budget& all = *new Budget();
  return all;
}

bool charge(DeviceOrdinal device, std::size_t num_bytes) {
  const std::lock_guard lock(budget().mutex);
  std::size_t& used = budget().used[device];
  if (num_bytes > settings().memory_bytes - used) return false;
  used += num_bytes;
  return true;
}

/// The GPU whose memory a descriptor is; -1 if none.
int device_of(int fd) {
  char link[128] = {};
  if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link, sizeof(link) - 1) < 0)
    return -1;
  std::string_view name = link;  // "/memfd:NAME (deleted)"
  const std::size_t begin = name.find(kName);
  if (begin == name.npos) return -1;
  name.remove_prefix(begin + kName.size());
  int device = -1;
  std::from_chars(name.data(), name.data() + name.size(), device);
  return device;
}

/// The content of a 64-byte IPC handle: where to find the memory's descriptor while the process
/// that created it lives. The inode shows whether it is still the same memory.
struct IpcHandle {
  char magic[8];
  pid_t pid;
  int fd;
  ino_t inode;
  std::uint8_t reserved[40];
};
static_assert(sizeof(IpcHandle) == 64);

constexpr char kMagic[8] = "emuipc";  // its last byte is the kind

ino_t inode_of(int fd) {
  struct stat status = {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

// A process that opens memory or an event locks its first byte for reading, on its own file
// description. The system releases the lock with the description, also if the process is killed.
struct flock first_byte(short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Result PhysicalMemory::create(DeviceOrdinal device, std::size_t num_bytes,
                              std::shared_ptr<PhysicalMemory>* memory) {
  if (!charge(device, num_bytes)) return kErrorOutOfMemory;
  auto made = std::make_shared<PhysicalMemory>();
  made->charged_ = device;
  made->num_bytes_ = num_bytes;
  made->physical_device_ = emulator::physical_device(device);
  const std::string name = std::string(kName) + std::to_string(made->physical_device_);
  made->fd_.reset(memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!made->fd_ || ftruncate(made->fd(), static_cast<off_t>(num_bytes)) != 0)
    return kErrorOutOfMemory;
  made->inode_ = inode_of(made->fd());
  *memory = std::move(made);
  return kSuccess;
}

Result PhysicalMemory::import(int fd, std::shared_ptr<PhysicalMemory>* memory) {
  struct stat status = {};
  const int device = device_of(fd);
  if (device < 0 || fstat(fd, &status) != 0) return kInvalidValue;
  auto made = std::make_shared<PhysicalMemory>();
  made->fd_.reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!made->fd_) return kOperatingSystem;
  made->num_bytes_ = static_cast<std::size_t>(status.st_size);
  made->physical_device_ = device;
  made->inode_ = status.st_ino;
  made->is_exportable = true;
  *memory = std::move(made);
  return kSuccess;
}

PhysicalMemory::~PhysicalMemory() {
  if (charged_ < 0) return;
  const std::lock_guard lock(budget().mutex);
  budget().used[charged_] -= num_bytes_;
}

std::size_t used_bytes(DeviceOrdinal device) {
  const std::lock_guard lock(budget().mutex);
  return budget().used[device];
}

Result write_handle(IpcKind kind, int fd, void* handle) {
  if (!settings().has_ipc) return kNotSupported;
  IpcHandle made = {};
  std::memcpy(made.magic, kMagic, sizeof(kMagic));
  made.magic[7] = static_cast<char>(kind);
  made.pid = getpid();
  made.fd = fd;
  made.inode = inode_of(fd);
  std::memcpy(handle, &made, sizeof(made));
  return kSuccess;
}

void check_not_opened_elsewhere(int fd, const char* what) {
  struct flock lock = first_byte(F_WRLCK);
  if (fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) return;
  std::fprintf(stderr, "libcuda_emulator: %s is freed while another process has it open\n", what);
  std::abort();
}

Result open_handle(IpcKind kind, const void* handle, shm::UniqueFd* fd) {
  if (!settings().has_ipc) return kNotSupported;
  IpcHandle made;
  std::memcpy(&made, handle, sizeof(made));
  if (std::memcmp(made.magic, kMagic, 7) != 0 || made.magic[7] != static_cast<char>(kind))
    return kInvalidValue;
  if (made.pid == getpid()) return kInvalidContext;
  const std::string path = "/proc/" + std::to_string(made.pid) + "/fd/" + std::to_string(made.fd);
  fd->reset(open(path.c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock = first_byte(F_RDLCK);
  const bool is_open = *fd && inode_of(fd->get()) == made.inode;
  return is_open && fcntl(fd->get(), F_OFD_SETLK, &lock) == 0 ? kSuccess : kMapFailed;
}

}  // namespace ringcomm::emulator
