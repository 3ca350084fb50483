#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/driver/driver.h"
#include "host/fd.h"

namespace ringcomm::cuda {

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

/// Memory of a device that other processes can map, by a file descriptor (virtual memory
/// management): it exists until its owner has freed it and every process has unmapped it. Or memory
/// that another process has allocated by cuMemAlloc. All functions throw Error.
class DeviceMemory {
 public:
  /// Allocates at least `num_bytes`, rounded up to the driver's granularity.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes);
  /// Maps memory for `device`, from the result of export_fd() or a handle of another process.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, const host::UniqueFd& fd);
  DeviceMemory(DeviceOrdinal device, const IpcMemHandle& handle);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t num_bytes() const { return num_bytes_; }

  host::UniqueFd export_fd() const;

 private:
  void map();
  void release() noexcept;

  DeviceOrdinal device_;
  std::size_t num_bytes_ = 0;  // of what was opened by a handle: unknown
  MemoryHandle handle_ = 0;    // the same
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

/// An allocation of another process, as that process knows it.
struct PeerAllocation {
  std::uint64_t process = 0;  ///< random bits of it, not its pid
  std::uint64_t id = 0;       ///< the driver's number of it, which is never used again
  DevicePtr base = 0;
  IpcMemHandle handle = {};
};

/// The allocations of other processes that this process has mapped on a device, each once for all
/// of its groups. From any thread; kept as long as the process.
class PeerMappings : public PerDevice<PeerMappings> {
 public:
  /// One allocation. It is unmapped with its last owner, unless it was before.
  struct Mapping {
    std::byte* data = nullptr;
    std::optional<DeviceMemory> memory;  ///< unmap()'s
  };

  /// Maps it, or finds the mapping that another group has. Throws Error if the driver refuses, as
  /// older ones do while memory that had the same address is mapped.
  std::shared_ptr<Mapping> map(const PeerAllocation& source);
  /// Of memory that its owner has freed, which no kernel uses: for all groups, of which some may
  /// make no more calls. Waits for the kernels of this process.
  void unmap(Mapping& mapping);

 private:
  friend PerDevice;
  explicit PeerMappings(DeviceOrdinal device) : device_(device) {}

  DeviceOrdinal device_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::weak_ptr<Mapping>> all_;
};

}  // namespace ringcomm::cuda
