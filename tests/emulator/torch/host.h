#pragma once

#include <c10/core/Allocator.h>

namespace ringcomm::emulator {

/// Of host memory to and from which copies are asynchronous, if the program asks for that.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* data);

}  // namespace ringcomm::emulator
