#include "emulator/ipc_handle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr char kMagic[8] = "emuipc";  // its last byte is the kind

ino_t inode_of(int fd) {
  struct stat status = {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

}  // namespace

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

Result open_handle(IpcKind kind, const void* handle, shm::UniqueFd* fd) {
  if (!settings().has_ipc) return kNotSupported;
  IpcHandle made;
  std::memcpy(&made, handle, sizeof(made));
  if (std::memcmp(made.magic, kMagic, 7) != 0 || made.magic[7] != static_cast<char>(kind))
    return kInvalidValue;
  if (made.pid == getpid()) return kInvalidContext;
  const std::string path = "/proc/" + std::to_string(made.pid) + "/fd/" + std::to_string(made.fd);
  fd->reset(open(path.c_str(), O_RDWR | O_CLOEXEC));
  return *fd && inode_of(fd->get()) == made.inode ? kSuccess : kMapFailed;
}

}  // namespace ringcomm::emulator
