#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "emulator/errors.h"
#include "emulator/extra_api.h"
#include "emulator/toy_kernels.h"
#include "transport/cuda/driver.h"

// What the emulator's tests share: its functions as a program sees them, and a stream with toys.

namespace ringcomm::emulator::testing {

using namespace cuda;

const ExtraDriverApi& extra();

/// Makes the primary context of a device current for this thread, and returns it.
Context use_device(DeviceOrdinal device);

Function toy(const char* name);
template <class Parameter>
Result launch(const char* name, Parameter parameter, StreamHandle stream, unsigned num_blocks = 1,
              unsigned num_threads = 128) {
  void* parameters[] = {&parameter};
  return driver().launch_kernel(toy(name), num_blocks, 1, 1, num_threads, 1, 1, 0, stream,
                                parameters, nullptr);
}

/// `num_elems` zeros in memory of the current device, from cuMemAlloc.
std::int32_t* zeros(std::size_t num_elems);
/// A word that kernels and the host share, at first 0.
std::uint32_t* flag();
void set(std::uint32_t* flag, std::uint32_t value);
std::uint32_t get(const std::uint32_t* flag);
/// Copies from device memory on a stream of its own, and waits.
std::vector<std::int32_t> values(const std::int32_t* from, std::size_t num_elems);

StreamHandle new_stream();
EventHandle new_event(unsigned flags = kEventDisableTiming);

inline DevicePtr address_of(const void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }
inline std::int32_t* elems_at(DevicePtr address) {
  return reinterpret_cast<std::int32_t*>(address);
}
/// A property for cuMemCreate: memory of `device` whose descriptor can be exported.
MemAllocationProp shareable_on(DeviceOrdinal device);

}  // namespace ringcomm::emulator::testing
