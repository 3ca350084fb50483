#include "emulator/residency.h"

#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>

#include "emulator/settings.h"

namespace ringcomm::emulator {
namespace {

constexpr int kTurnByte = 0;
constexpr int kFirstSlotByte = 1;
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

/// Locks, or with F_UNLCK unlocks, bytes of a GPU; `waits` until that can be. False where another
/// process has them. Threads of a process do not keep each other out.
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

}  // namespace

Residency& Residency::of(DeviceOrdinal device) {
  static auto& mutex = *new std::mutex();
  static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<Residency>>();
  const std::lock_guard lock(mutex);
  std::unique_ptr<Residency>& slots = all[device];
  if (slots == nullptr) slots.reset(new Residency(physical_device(device)));
  return *slots;
}

Residency::Residency(int physical_device)
    : device_(physical_device),
      is_taken_(static_cast<std::size_t>(settings().num_real_sms * settings().blocks_per_sm)) {}

void Residency::begin_kernel() {
  if (settings().has_mps) return;
  const std::lock_guard lock(mutex_);
  if (num_kernels_++ == 0) lock_bytes(device_, kTurnByte, 1, F_WRLCK, true);
}

void Residency::end_kernel() {
  if (settings().has_mps) return;
  const std::lock_guard lock(mutex_);
  if (--num_kernels_ == 0) lock_bytes(device_, kTurnByte, 1, F_UNLCK, true);
}

int Residency::acquire(int num_slots) {
  const int per_sm = settings().blocks_per_sm;
  for (;;) {
    for (int in_sm = 0; in_sm + num_slots <= per_sm; ++in_sm)
      for (int sm = 0; sm < settings().num_real_sms; ++sm)
        if (try_acquire(sm * per_sm + in_sm, num_slots)) return sm * per_sm + in_sm;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

bool Residency::try_acquire(int slot, int num_slots) {
  int num_taken = 0;
  while (num_taken < num_slots && !is_taken_[static_cast<std::size_t>(slot + num_taken)].exchange(
                                      true, std::memory_order_relaxed))
    ++num_taken;
  if (num_taken == num_slots &&
      lock_bytes(device_, kFirstSlotByte + slot, num_slots, F_WRLCK, false))
    return true;
  while (num_taken > 0)
    is_taken_[static_cast<std::size_t>(slot + --num_taken)].store(false, std::memory_order_relaxed);
  return false;
}

void Residency::release(int slot, int num_slots) {
  lock_bytes(device_, kFirstSlotByte + slot, num_slots, F_UNLCK, false);
  for (int i = slot; i < slot + num_slots; ++i)
    is_taken_[static_cast<std::size_t>(i)].store(false, std::memory_order_relaxed);
}

}  // namespace ringcomm::emulator
