#include "emulator/block_slots.h"

#include <fcntl.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "emulator/gpu_locks.h"
#include "emulator/settings.h"

namespace ringcomm::emulator {

BlockSlots& BlockSlots::of(DeviceOrdinal device) {
  static auto& mutex = *new std::mutex();
  static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<BlockSlots>>();
  const std::lock_guard lock(mutex);
  std::unique_ptr<BlockSlots>& slots = all[device];
  if (slots == nullptr) slots.reset(new BlockSlots(physical_device(device)));
  return *slots;
}

BlockSlots::BlockSlots(int physical_device)
    : device_(physical_device),
      is_taken_(static_cast<std::size_t>(settings().num_real_sms * settings().blocks_per_sm)) {}

int BlockSlots::acquire(int num_slots) {
  const int per_sm = settings().blocks_per_sm;
  for (;;) {
    for (int in_sm = 0; in_sm + num_slots <= per_sm; ++in_sm)
      for (int sm = 0; sm < settings().num_real_sms; ++sm)
        if (try_acquire(sm * per_sm + in_sm, num_slots)) return sm * per_sm + in_sm;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

bool BlockSlots::try_acquire(int slot, int num_slots) {
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

void BlockSlots::release(int slot, int num_slots) {
  lock_bytes(device_, kFirstSlotByte + slot, num_slots, F_UNLCK, false);
  for (int i = slot; i < slot + num_slots; ++i)
    is_taken_[static_cast<std::size_t>(i)].store(false, std::memory_order_relaxed);
}

}  // namespace ringcomm::emulator
