#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "cuda/driver/driver.h"
#include "host/fd.h"

namespace ringcomm::cuda {

/// A physical allocation that is mapped into a reservation of addresses, as torch's expandable
/// segments are made of. Its handle is retained: the memory stays, and the driver gives the handle
/// to no other.
struct MappedPiece {
  MemoryHandle handle;
  std::uint64_t id;  ///< never used again in this process, nor the driver's for an allocation
  ~MappedPiece() { driver().mem_release(handle); }
};

/// What the driver knows of the allocation that an address is in, or the piece.
struct Allocation {
  std::uint64_t id = 0;  ///< never used again in this process; 0: none is known
  DevicePtr base = 0;
  std::size_t num_bytes = 0;
  bool has_handle = false;  ///< of its own, for other processes: not of a pool
  std::shared_ptr<const MappedPiece> piece = nullptr;
  DevicePtr range_base = 0;  ///< of the addresses that the piece is mapped into
  std::size_t range_bytes = 0;
};
Allocation allocation_of(const void* address);
/// For another process, which maps it. Throws Error.
host::UniqueFd export_memory(MemoryHandle handle);
/// Whether less than a sixteenth of the memory of the current context's device is free, as far as
/// the driver says.
bool is_memory_scarce();

/// The first of addresses of this process that no other memory gets meanwhile.
using AddressRange = std::shared_ptr<const DevicePtr>;

/// Memory of a device that other processes can map, by a file descriptor (virtual memory
/// management): it exists until its owner has freed it and every process has unmapped it. Or memory
/// that another process has allocated by cuMemAlloc. All functions throw Error.
class DeviceMemory {
 public:
  /// Allocates at least `num_bytes`, rounded up to the driver's granularity.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes);
  /// Maps memory for `device`, from the result of export_memory() or a handle of another process;
  /// the former into a range of its own, or at an offset into one that has room there.
  DeviceMemory(DeviceOrdinal device, std::size_t num_bytes, const host::UniqueFd& fd,
               AddressRange range = nullptr, std::size_t offset = 0);
  DeviceMemory(DeviceOrdinal device, const IpcMemHandle& handle);
  ~DeviceMemory();
  DeviceMemory& operator=(DeviceMemory&&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t num_bytes() const { return num_bytes_; }

  host::UniqueFd export_fd() const { return export_memory(handle_); }

 private:
  void map(std::size_t offset);
  void release() noexcept;

  DeviceOrdinal device_;
  std::size_t num_bytes_ = 0;  // of what was opened by a handle: unknown
  MemoryHandle handle_ = 0;    // the same
  AddressRange range_;
  DevicePtr address_ = 0;
  bool is_mapped_ = false;
};

/// Pinned host memory that kernels read and write directly.
class MappedHostMemory {
 public:
  /// Zeroed; throws Error.
  MappedHostMemory(DeviceOrdinal device, std::size_t num_bytes);
  ~MappedHostMemory();
  MappedHostMemory& operator=(MappedHostMemory&&) = delete;

  void* host() const { return host_; }
  void* device() const { return device_; }

 private:
  DeviceOrdinal ordinal_;
  void* host_ = nullptr;
  void* device_ = nullptr;
};

/// An allocation of another process, as that process knows it, or a piece.
struct PeerAllocation {
  std::uint64_t process = 0;  ///< RankPlace's
  std::uint64_t id = 0;       ///< Allocation's
  DevicePtr base = 0;
  IpcMemHandle handle = {};   ///< of a piece: the text by which its file descriptor is fetched
  std::size_t num_bytes = 0;  ///< of a piece; 0: it is none
  DevicePtr range_base = 0;
  std::size_t range_bytes = 0;
};

/// The allocations of other processes that this process has mapped on a device, each once for all
/// of its groups. Pieces of one range are as far from each other as in their owner's process. From
/// any thread; kept as long as the process.
class PeerMappings : public PerDevice<PeerMappings> {
 public:
  /// One allocation. It is unmapped with its last owner, unless it was before.
  struct Mapping {
    std::byte* data = nullptr;
    std::optional<DeviceMemory> memory;  ///< unmap()'s
  };

  /// Maps it, or finds the mapping that another group has. `fetch` gets the descriptor of a piece.
  /// Throws Error if the driver refuses, as it does while a piece that had the same address is
  /// mapped, and older drivers for allocations, too.
  std::shared_ptr<Mapping> map(const PeerAllocation& source,
                               const std::function<host::UniqueFd()>& fetch);
  /// Of memory that its owner has freed, which no kernel uses: for all groups, of which some may
  /// make no more calls. Waits for the kernels of this process.
  void unmap(Mapping& mapping);

 private:
  friend PerDevice;
  explicit PeerMappings(DeviceOrdinal device) : device_(device) {}

  DeviceOrdinal device_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::weak_ptr<Mapping>> all_;
  // By process, and where they are there.
  std::map<std::tuple<std::uint64_t, DevicePtr, std::size_t>, AddressRange::weak_type> ranges_;
};

}  // namespace ringcomm::cuda
