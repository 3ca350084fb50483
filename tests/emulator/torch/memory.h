#pragma once

#include <c10/core/Allocator.h>

#include "emulator/torch/streams.h"

// Memory of the emulated GPUs under the rules of torch's caching allocator: a tensor's memory
// belongs to the stream that was current when it was made, and may be used anew as soon as that
// stream has done what it was given before the tensor's end; streams on which it was recorded
// (Tensor.record_stream) are waited for as well. No other stream is.
//
// Then the bytes become kPoison at once, unless RINGCOMM_EMULATOR_POISON=0: work that still uses
// them on a stream that was not recorded reads NaN, or -1. New memory has the same content.

namespace ringcomm::emulator {

inline constexpr unsigned char kPoison = 0xFF;

/// Allocates on the current device, for its current stream.
c10::Allocator& allocator();

/// Makes the end of a tensor's memory wait for what `stream` has been given until then.
void record_stream(const c10::DataPtr& memory, c10::Stream stream);

/// Copies bytes in the order of the stream; either side may be memory of the host, which stays
/// until then.
void copy_bytes(void* to, const void* from, std::size_t num_bytes, c10::Stream stream);
/// Fills bytes in the order of the stream.
void fill_bytes(void* to, unsigned char value, std::size_t num_bytes, c10::Stream stream);

/// The requested bytes of live tensors.
std::size_t allocated_bytes(c10::DeviceIndex device);

}  // namespace ringcomm::emulator
