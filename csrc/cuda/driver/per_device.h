#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "cuda/driver/driver_api.h"

namespace ringcomm::cuda {

/// The T of a device. The first call creates it with `make` (which returns a unique_ptr); if `make`
/// throws, the next call tries again. It is never destroyed, because threads may use it until the
/// process ends.
template <class T, class Make>
T& per_device(DeviceOrdinal device, const Make& make) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<T>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<T>& found = all[device];
  if (found == nullptr) found = make();
  return *found;
}

}  // namespace ringcomm::cuda
