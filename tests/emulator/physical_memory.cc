#include "emulator/physical_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
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

/// Which GPU's memory a descriptor is; -1 if none's.
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
  struct stat status = {};
  if (fstat(made->fd(), &status) != 0) return kOperatingSystem;
  made->inode_ = status.st_ino;
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

}  // namespace ringcomm::emulator
