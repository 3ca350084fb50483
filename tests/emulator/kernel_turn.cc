#include "emulator/kernel_turn.h"

#include <fcntl.h>

#include <map>
#include <mutex>

#include "emulator/gpu_locks.h"
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

}  // namespace

KernelTurn::KernelTurn(int physical_device) : device_(physical_device) {
  if (settings().has_mps) return;
  Turn& turn = turn_of(device_);
  const std::lock_guard lock(turn.mutex);
  if (turn.num_running++ == 0) lock_bytes(device_, kTurnByte, 1, F_WRLCK, true);
}

KernelTurn::~KernelTurn() {
  if (settings().has_mps) return;
  Turn& turn = turn_of(device_);
  const std::lock_guard lock(turn.mutex);
  if (--turn.num_running == 0) lock_bytes(device_, kTurnByte, 1, F_UNLCK, true);
}

}  // namespace ringcomm::emulator
