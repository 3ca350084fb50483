#include "emulator/kernel_turn.h"

#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

struct Turn {
  std::mutex mutex;
  int num_running = 0;  // kernels of this process
};

Turn& turn_of(int device) {
  static std::mutex& mutex = *new std::mutex();
  static std::map<int, Turn>& turns = *new std::map<int, Turn>();
  const std::lock_guard lock(mutex);
  return turns[device];
}

int open_library() {
  Dl_info info = {};
  const int fd = dladdr(reinterpret_cast<void*>(&open_library), &info) != 0
                     ? open(info.dli_fname, O_RDWR | O_CLOEXEC)
                     : -1;
  if (fd >= 0) return fd;
  std::perror("libcuda_emulator: cannot open the library's file to lock it");
  std::abort();
}

/// Locks or unlocks the byte of the file that stands for the device; waits for a lock.
void set_lock(int device, short type) {
  static const int fd = open_library();
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = device;
  range.l_len = 1;
  while (fcntl(fd, F_OFD_SETLKW, &range) != 0)
    if (errno != EINTR) {
      std::perror("libcuda_emulator: cannot lock the library's file");
      std::abort();
    }
}

}  // namespace

KernelTurn::KernelTurn(int physical_device) : device_(physical_device) {
  if (settings().has_mps) return;
  Turn& turn = turn_of(device_);
  const std::lock_guard lock(turn.mutex);
  if (turn.num_running++ == 0) set_lock(device_, F_WRLCK);
}

KernelTurn::~KernelTurn() {
  if (settings().has_mps) return;
  Turn& turn = turn_of(device_);
  const std::lock_guard lock(turn.mutex);
  if (--turn.num_running == 0) set_lock(device_, F_UNLCK);
}

}  // namespace ringcomm::emulator
