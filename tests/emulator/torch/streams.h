#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#include "cuda/driver/driver.h"

// The emulated GPUs as torch sees them: "emugpu", torch's private device type. Devices and streams
// work like torch's CUDA: each thread has a current device and, on each device, a current stream,
// initially the null stream. Further streams are from a pool and are never destroyed.

namespace ringcomm::emulator {

inline constexpr c10::DeviceType kEmulatedGpu = c10::DeviceType::PrivateUse1;

/// 0 without a driver.
c10::DeviceIndex num_devices() noexcept;
c10::DeviceIndex current_device();
/// Throws c10::Error if there is no such device; -1 keeps the current one.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
/// A device without an index is the current one.
c10::DeviceIndex index_of(c10::Device device);

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device);
/// One that only the allocator uses.
c10::Stream reclaim_stream(c10::DeviceIndex device);
/// Makes `stream` the current one of its device; returns the one before.
c10::Stream exchange_stream(c10::Stream stream);

cuda::StreamHandle handle_of(c10::Stream stream);
bool is_idle(c10::Stream stream);
bool is_capturing(c10::Stream stream);
void synchronize(c10::Stream stream);
/// Waits for all work on the device, of all threads.
void synchronize_device(c10::DeviceIndex device);

/// Makes `waiting` wait for what `stream` has been given so far.
void wait_for_stream(c10::Stream waiting, c10::Stream stream);
/// The stream calls `function` on its own thread and continues when that returns; the next
/// synchronize() throws its exception. A captured function is called at each launch of its graph.
void launch_host_function(c10::Stream stream, std::function<void()> function);
/// The same as a kernel that fills a multiprocessor: it waits until one is free of others.
void launch_operator(c10::Stream stream, std::function<void()> function);

}  // namespace ringcomm::emulator
