#pragma once

#include <cstddef>
#include <cstdint>

#include "core/errors.h"
#include "transport/cuda/driver.h"
#include "transport/shm/unique_fd.h"

namespace ringcomm::cuda {

/// How memory of a device is handed to other processes.
enum class HandleKind : std::uint8_t {
  kFd,  ///< virtual memory management, by file descriptor
  kIpc  ///< CUDA's older handles of 64 bytes, where the device or a container has no others
};

const char* name_of(HandleKind kind);

/// Memory of a device that other processes can map. It stays until its owner frees it and all who
/// have mapped it have unmapped it.
///
/// With kFd it is mapped where the driver likes, readable and writable by its own device; peers
/// give themselves access when they map it. All functions throw Error.
class DeviceMemory {
 public:
  /// Own memory, of at least `num_bytes`, in multiples of what the driver allocates.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, HandleKind kind);
  /// Another process's: what export_fd() or ipc_handle() gave there, for use by `device`.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, const shm::UniqueFd& fd);
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, const IpcMemHandle& handle);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t num_bytes() const { return num_bytes_; }

  shm::UniqueFd export_fd() const;
  IpcMemHandle ipc_handle() const;

 private:
  void map();
  void release() noexcept;

  DeviceOrdinal device_;
  std::size_t num_bytes_;
  HandleKind kind_;
  bool is_own_;
  MemoryHandle handle_ = 0;
  DevicePtr address_ = 0;
  bool is_mapped_ = false;
};

/// What the device can hand out; kFd where it says so.
HandleKind best_handle_kind(DeviceOrdinal device);

/// Host memory that kernels read and write where it lies.
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
