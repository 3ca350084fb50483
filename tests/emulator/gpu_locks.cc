#include "emulator/gpu_locks.h"

#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr int kDeviceBits = 20;  // of an offset: a byte of a GPU
constexpr int kBoxBits = 26;     // and one of the GPUs of a box

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::abort();
}

/// The library's own file, which all have.
int open_library() {
  Dl_info info = {};
  const int fd = dladdr(reinterpret_cast<void*>(&open_library), &info) != 0
                     ? open(info.dli_fname, O_RDWR | O_CLOEXEC)
                     : -1;
  if (fd < 0) fail("libcuda_emulator: cannot open the library's file to lock it");
  return fd;
}

}  // namespace

bool lock_bytes(int physical_device, int begin, int num_bytes, short type, bool waits) {
  static const int fd = open_library();
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start =
      (off_t{settings().box} << kBoxBits) + (off_t{physical_device} << kDeviceBits) + begin;
  range.l_len = num_bytes;
  while (fcntl(fd, waits ? F_OFD_SETLKW : F_OFD_SETLK, &range) != 0) {
    if (!waits && (errno == EAGAIN || errno == EACCES)) return false;
    if (errno != EINTR) fail("libcuda_emulator: cannot lock the library's file");
  }
  return true;
}

}  // namespace ringcomm::emulator
