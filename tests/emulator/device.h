#pragma once

#include <atomic>
#include <mutex>
#include <set>

#include "emulator/errors.h"
#include "emulator/exports.h"

/// A device's primary context: the only one it has.
struct ringcomm::cuda::ContextTag {
  DeviceOrdinal device = 0;
  std::mutex mutex;
  bool is_retained = false;
  std::set<Context> peers;  // whose memory it may map
  StreamHandle null_stream = nullptr;
};

namespace ringcomm::emulator {

/// How many blocks a GPU holds at a time: kernels of all streams of the process compete for them.
/// It orders nothing, so that ThreadSanitizer sees kernels race that no event keeps apart.
class BlockSlots {
 public:
  explicit BlockSlots(int num_slots) : num_free_(num_slots) {}
  void acquire();
  void release() { num_free_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<int> num_free_;
};

/// kNotInitialized before cuInit, and in a child that was forked after it.
Result require_initialized();
/// And that there is a device of this number.
Result require_device(DeviceOrdinal device);
/// And that this thread has a current context.
Result require_context(Context* current);

/// The number of the GPU itself, which processes agree on.
int physical_device(DeviceOrdinal device);
/// Whether kernels on one device can have memory of another; a device has its own.
bool can_map(DeviceOrdinal device, int physical);
/// The primary context of a device that exists.
Context context_of(DeviceOrdinal device);
BlockSlots& block_slots(DeviceOrdinal device);

}  // namespace ringcomm::emulator
