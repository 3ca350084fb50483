#pragma once

#include "emulator/extra_api.h"
#include "transport/cuda/driver.h"

namespace ringcomm::emulator {

/// What the emulator has beyond what ringcomm calls, looked up in the library that
/// cuda::driver() has opened. Throws c10::Error where that is another one.
const ExtraDriverApi& extra_driver();

using cuda::RelaxedCapture;

}  // namespace ringcomm::emulator
