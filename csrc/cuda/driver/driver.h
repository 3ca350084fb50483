#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/driver/driver_api.h"

namespace ringcomm::cuda {

/// The driver of this machine's GPUs: libcuda, opened at the first call and never closed.
/// RINGCOMM_CUDA_DRIVER names another file, such as the emulator of the tests.
///
/// Throws Error (kSystem) with the reason if there is no driver or it is too old.
const DriverApi& driver();

/// Whether driver() would return, and if not, why.
bool has_driver(std::string* reason = nullptr);

/// Throws Error (kSystem) naming the function and CUDA's words unless `result` is success; `what`
/// is what could not be done ("allocate 12 MiB of staging").
void check(Result result, const char* what);

/// Makes a device's primary context, which torch also uses, current while it lives. This is one
/// driver call if it is current already, as on threads that use the device through torch.
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

/// While it lives, this thread may make calls that could wait for the device, such as an
/// allocation, although another stream is being captured. None of these calls is part of the
/// capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

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
