#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/driver/device_memory.h"

namespace ringcomm::cuda {

/// An allocation of another process, as that process knows it.
struct PeerAllocation {
  std::uint64_t process = 0;  ///< random bits of it, not its pid
  std::uint64_t id = 0;       ///< the driver's number of it, which is never used again
  DevicePtr base = 0;
  IpcMemHandle handle = {};
};

/// The allocations of other processes that this process has mapped on a device, each once for all
/// of its groups. From any thread; kept as long as the process.
class PeerMappings {
 public:
  /// One allocation. It is unmapped with its last owner, unless it was before.
  class Mapping {
   public:
    std::byte* data() const { return data_; }

   private:
    friend class PeerMappings;
    std::byte* data_ = nullptr;
    std::optional<DeviceMemory> memory_;
  };

  static PeerMappings& of(DeviceOrdinal device);

  /// Maps it, or finds the mapping that another group has. Throws Error if the driver refuses, as
  /// older ones do while memory that had the same address is mapped.
  std::shared_ptr<Mapping> map(const PeerAllocation& source);
  /// Of memory that its owner has freed, which no kernel uses: for all groups, of which some may
  /// make no more calls. Waits for the kernels of this process.
  void unmap(Mapping& mapping);

 private:
  explicit PeerMappings(DeviceOrdinal device) : device_(device) {}

  DeviceOrdinal device_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::weak_ptr<Mapping>> all_;
};

}  // namespace ringcomm::cuda
