#include "emulator/ipc_handle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
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

// Who opens something locks its first byte for reading, on a file description of its own: the lock
// goes with that, also when its process is killed.
struct flock first_byte(short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return lock;
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
