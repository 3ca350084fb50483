#pragma once

#include <mutex>

#include "emulator/errors.h"
#include "emulator/exports.h"

/// A device's primary context: the only one it has.
struct ringcomm::cuda::ContextTag {
  DeviceOrdinal device = 0;
  std::mutex mutex;
  bool is_retained = false;
  StreamHandle null_stream = nullptr;
};

namespace ringcomm::emulator {

/// kNotInitialized before cuInit, and in a child that was forked after it.
Result require_initialized();
/// And that there is a device of this number.
Result require_device(DeviceOrdinal device);
/// And that this thread has a current context.
Result require_context(Context* current = nullptr);

/// The number of the GPU itself, which processes agree on.
int physical_device(DeviceOrdinal device);
/// Whether kernels on one device can have memory of another; a device has its own.
bool can_map(DeviceOrdinal device, int physical);
/// The primary context of a device that exists.
Context context_of(DeviceOrdinal device);

}  // namespace ringcomm::emulator
