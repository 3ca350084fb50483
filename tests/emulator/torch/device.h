#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#include "cuda/driver/driver.h"

// The emulated GPUs as torch sees them: "emugpu", torch's private device type. Devices and streams
// work like torch's CUDA: each thread has a current device and, on each device, a current stream,
// initially the null stream. Further streams are from a pool and are never destroyed.

namespace ringcomm::emulator {

using cuda::check;
using cuda::ContextGuard;
using cuda::driver;

inline constexpr c10::DeviceType kEmulatedGpu = c10::DeviceType::PrivateUse1;

/// 0 without a driver.
c10::DeviceIndex num_devices() noexcept;
c10::DeviceIndex current_device();
/// Throws c10::Error if there is no such device; -1 keeps the current one.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device);

cuda::StreamHandle handle_of(c10::Stream stream);
bool is_idle(c10::Stream stream);
bool is_capturing(c10::Stream stream);
void synchronize(c10::Stream stream);
/// Makes `waiting` wait for what `stream` has been given so far.
void wait_for_stream(c10::Stream waiting, c10::Stream stream);
/// The stream calls `function` on its own thread and continues when that returns; an exception ends
/// the process. A captured function is called at each launch of its graph. An operator is a kernel
/// that fills a multiprocessor: it waits until one is free of others.
void launch(c10::Stream stream, std::function<void()> function, bool is_operator = false);

// Memory under the rules of torch's caching allocator: a tensor's memory belongs to the stream that
// was current when it was made, and is used anew by what this stream is given after the tensor's
// end. Streams on which it was recorded (Tensor.record_stream) are waited for before. No other
// stream is.
//
// With the next tensor that a stream makes, it fills all memory that it got back with 0xFF: work
// that still uses it on another stream, which was neither recorded nor waited for, reads NaN, or
// -1. New memory has the same content.
//
// With RINGCOMM_EMULATOR_SEGMENTS in the environment, blocks and segments have the sizes that they
// have with CUDA, are split and joined as there, and are counted so. Without, each tensor has an
// allocation of the driver's, behind which the host faults, and counts with the bytes asked for.
//
// With RINGCOMM_EMULATOR_PIECES, allocations are made of pieces of 2 MiB, which are mapped side by
// side into a range of addresses of their stream's, as in torch's expandable segments.

/// Allocates on the current device, for its current stream.
c10::Allocator& allocator();
/// Makes the end of a tensor's memory wait for what `stream` has been given until then.
void record_stream(const c10::DataPtr& memory, c10::Stream stream);

/// Of host memory to and from which copies are asynchronous, if the program asks for that.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* data);

/// Copies bytes in the order of the stream; either side may be memory of the host, which stays
/// until then.
void copy_bytes(void* to, const void* from, std::size_t num_bytes, c10::Stream stream);
/// Fills bytes in the order of the stream.
void fill_bytes(void* to, unsigned char value, std::size_t num_bytes, c10::Stream stream);

}  // namespace ringcomm::emulator
