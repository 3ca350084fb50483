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
  std::uint64_t num_bytes = 0;
  IpcMemHandle handle = {};
};

/// The allocations of other processes that this process has mapped on a device, each once for all
/// of its groups. From any thread; kept as long as the process.
///
/// The driver maps no allocation of a peer at whose address it still has an older one mapped, so
/// one that has been freed is unmapped for all groups at once: no kernel of any group uses it.
class PeerMappings {
 public:
  /// One allocation. It is unmapped with its last owner, unless it was before.
  class Mapping {
   public:
    std::byte* data() const { return data_; }

   private:
    friend class PeerMappings;
    PeerAllocation source_;
    std::byte* data_ = nullptr;
    std::optional<DeviceMemory> memory_;
  };

  static PeerMappings& of(DeviceOrdinal device);

  /// Maps it, or finds the mapping that another group has. What was mapped of the same addresses
  /// has been freed, and is unmapped first; null where that is needed and not `may_unmap`. Throws
  /// Error if the driver refuses.
  std::shared_ptr<Mapping> map(const PeerAllocation& source, bool may_unmap);
  /// Of memory that its owner has freed.
  void unmap(Mapping& mapping);

 private:
  explicit PeerMappings(DeviceOrdinal device) : device_(device) {}
  bool make_way(const PeerAllocation& source, bool may_unmap);

  DeviceOrdinal device_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::weak_ptr<Mapping>> all_;
};

}  // namespace ringcomm::cuda
