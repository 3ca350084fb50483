#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

#include "transport/cuda/driver.h"

// The emulated GPUs as torch sees them: "emugpu", the device type that torch keeps for others.
// Devices and streams follow torch's CUDA: each thread has a current device and, on each device, a
// current stream, which at first is the null stream; further streams come from a pool and stay.

namespace ringcomm::emulator {

inline constexpr c10::DeviceType kEmulatedGpu = c10::DeviceType::PrivateUse1;

/// 0 where there is no driver.
c10::DeviceIndex num_devices() noexcept;
c10::DeviceIndex current_device();
/// Throws c10::Error where there is no such device; -1 leaves the current one.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
/// A device without an index is the current one.
c10::DeviceIndex index_of(c10::Device device);

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream stream_from_pool(c10::DeviceIndex device);
/// Makes `stream` the current one of its device; returns the one before.
c10::Stream exchange_stream(c10::Stream stream);

cuda::StreamHandle handle_of(c10::Stream stream);
bool is_idle(c10::Stream stream);
bool is_capturing(c10::Stream stream);
void synchronize(c10::Stream stream);
/// All of the device's work, whoever submitted it.
void synchronize_device(c10::DeviceIndex device);

/// Makes `waiting` wait for what `stream` has been given so far.
void wait_for_stream(c10::Stream waiting, c10::Stream stream);
/// The stream calls `function`, on a thread of its own, and goes on when that returns; what it
/// throws, the next synchronize() does. A captured one is called with each launch of its graph.
void launch_host_function(c10::Stream stream, std::function<void()> function);
/// The same as a kernel that fills a multiprocessor: it waits until one is free of others.
void launch_operator(c10::Stream stream, std::function<void()> function);

}  // namespace ringcomm::emulator
