#pragma once

// Memory that one process allocates and the other one opens by an IPC handle.

#include "gpu/probe/gpu.h"
#include "gpu/probe/pair.h"

namespace ringcomm::probe {

inline constexpr std::size_t kBytes = std::size_t{32} << 20;
inline constexpr unsigned char kOld = 0x11, kNew = 0x22;

inline cuda::Result try_open(const cuda::IpcMemHandle& handle, cuda::DevicePtr* address) {
  return cuda::driver().ipc_open_mem_handle(address, handle, cuda::kIpcLazyPeerAccess);
}
inline cuda::DevicePtr open(const cuda::IpcMemHandle& handle) {
  cuda::DevicePtr address = 0;
  cuda::check(try_open(handle, &address), "open a handle");
  return address;
}
inline void close(cuda::DevicePtr address) {
  cuda::check(cuda::driver().ipc_close_mem_handle(address), "close a handle");
}
inline bool is_mapped(cuda::DevicePtr address) {
  return cuda::allocation_of(reinterpret_cast<const void*>(address)).base == address;
}
inline std::string content(Gpu& gpu, cuda::DevicePtr address) {
  const std::uint32_t value = gpu.read(address);
  return value == kOld * 0x01010101u   ? "the old content"
         : value == kNew * 0x01010101u ? "the new content"
                                       : "other content";
}

/// Allocates, fills, and puts the handle into the page.
inline cuda::DevicePtr hand_out(Side& side, Gpu& gpu, unsigned char value) {
  cuda::DevicePtr address = 0;
  cuda::check(cuda::driver().mem_alloc(&address, kBytes), "allocate");
  gpu.fill(address, value, kBytes);
  cuda::check(cuda::driver().ipc_get_mem_handle(&side.page.handle, address), "make a handle");
  return address;
}

/// The exporter keeps memory until the importer has used its handle.
template <class Use>
void share(Side& side, Gpu& gpu, const Use& use) {
  if (side.exports()) hand_out(side, gpu, kOld);
  side.meet();
  if (!side.exports()) use(side.page.handle);
  side.meet();
}

}  // namespace ringcomm::probe
