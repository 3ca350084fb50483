#pragma once

#include <string>

#include "transport/cuda/driver_api.h"

namespace ringcomm::cuda {

/// The driver of this machine's GPUs: libcuda, opened when first asked for, and never closed.
/// RINGCOMM_CUDA_DRIVER names another file, such as the emulator of the tests.
///
/// Throws Error (kSystem), with the reason, where there is none or it is too old.
const DriverApi& driver();

/// Whether driver() would return, and if not, why.
bool has_driver(std::string* reason = nullptr);

/// Throws Error (kSystem) naming the function and CUDA's words unless `result` is success; `what`
/// is what could not be done ("allocate 12 MiB of staging").
void check(Result result, const char* what);

/// Makes a device's primary context, which torch uses too, current while it lives. Where it is
/// already, as on threads that have used the device by torch, that is one call of the driver.
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

/// While it lives, this thread may do what might wait for the device, such as allocate, although a
/// stream elsewhere is being captured: nothing of it is for that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

}  // namespace ringcomm::cuda
