#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "cuda/driver/driver_api.h"

namespace ringcomm::cuda {

/// The driver of this machine's GPUs: libcuda, or what RINGCOMM_CUDA_DRIVER names, opened at the
/// first call. Throws Error (kSystem) with the reason if there is none or it is too old.
const DriverApi& driver();

/// Whether driver() would return.
bool has_driver();

/// Throws Error (kSystem) with CUDA's words unless `result` is success; `what` could not be done.
void check(Result result, const char* what);

/// Makes a device's primary context, which torch also uses, current while it lives: one driver call
/// if it is current already.
class ContextGuard {
 public:
  explicit ContextGuard(DeviceOrdinal device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  Context previous_ = nullptr;
  bool is_changed_ = false;
};

/// While it lives, this thread may make calls that could wait for the device, such as allocations,
/// although another stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

/// A base of T, of which there is one object for each device.
template <class T>
class PerDevice {
 public:
  /// Made by the first call, T(device); if that throws, the next call tries again. Never destroyed:
  /// threads may use it until the process ends.
  static T& of(DeviceOrdinal device) {
    static auto& mutex = *new std::mutex;
    static auto& all = *new std::map<DeviceOrdinal, std::unique_ptr<T>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<T>& found = all[device];
    if (found == nullptr) found.reset(new T(device));
    return *found;
  }
};

}  // namespace ringcomm::cuda
