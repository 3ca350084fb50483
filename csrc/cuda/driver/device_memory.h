#pragma once

#include <cstddef>
#include <cstdint>

#include "core/errors.h"
#include "cuda/driver/driver.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// How device memory is shared with other processes.
enum class HandleKind : std::uint8_t {
  kFd,  ///< virtual memory management, by file descriptor
  kIpc  ///< cuMemAlloc's memory; its owner must not free it while another process has it open
};

/// What the driver knows of the allocation that an address is in.
struct Allocation {
  std::uint64_t id = 0;  ///< never used again in this process; 0: none is known
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  bool has_ipc_handle = false;  ///< of its own: neither of virtual memory nor of a pool
};
Allocation allocation_of(const void* address);
/// Whether less than a sixteenth of the memory of the current context's device is free, as far as
/// the driver says.
bool is_memory_scarce();

/// Memory of a device that other processes can map. With kFd it exists until its owner has freed it
/// and every process has unmapped it. All functions throw Error.
class DeviceMemory {
 public:
  /// Allocates at least `num_bytes`, rounded up to the driver's granularity.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, HandleKind kind);
  /// Maps memory for `device`, from the result of export_fd() or a handle of another process.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, const shm::UniqueFd& fd);
  DeviceMemory(DeviceOrdinal device, const IpcMemHandle& handle);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t num_bytes() const { return num_bytes_; }

  shm::UniqueFd export_fd() const;

 private:
  void map();
  void release() noexcept;

  DeviceOrdinal device_;
  std::size_t num_bytes_ = 0;  // of what was opened by a handle: unknown
  HandleKind kind_;
  bool is_own_;
  MemoryHandle handle_ = 0;
  DevicePtr address_ = 0;
  bool is_mapped_ = false;
};

/// Pinned host memory that kernels read and write directly.
class MappedHostMemory {
 public:
  /// Zeroed; throws Error.
  MappedHostMemory(DeviceOrdinal device, std::size_t num_bytes);
  ~MappedHostMemory();
  MappedHostMemory(const MappedHostMemory&) = delete;
  MappedHostMemory& operator=(const MappedHostMemory&) = delete;

  void* host() const { return host_; }
  void* device() const { return device_; }

 private:
  DeviceOrdinal ordinal_;
  void* host_ = nullptr;
  void* device_ = nullptr;
};

}  // namespace ringcomm::cuda
