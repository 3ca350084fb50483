#pragma once

#include <c10/core/Allocator.h>

namespace ringcomm::emulator {

/// Memory of the host that the driver knows, for Tensor.pin_memory(). Used anew as soon as its
/// tensor is gone: no copy of emugpu's reads or writes it later than the call.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

}  // namespace ringcomm::emulator
