#pragma once

#include "emulator/extra_api.h"
#include "transport/cuda/driver.h"

namespace ringcomm::emulator {

/// What the emulator has beyond what ringcomm calls, looked up in the library that
/// cuda::driver() has opened. Throws c10::Error where that is another one.
const ExtraDriverApi& extra_driver();

/// Calls of this thread that a capture on another stream would forbid are allowed while it lives.
class RelaxedCapture {
 public:
  RelaxedCapture() { extra_driver().exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { extra_driver().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

}  // namespace ringcomm::emulator
