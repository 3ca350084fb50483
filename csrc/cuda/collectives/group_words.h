#pragma once

#include <atomic>
#include <cstdint>

#include "communicator/records.h"
#include "core/arch.h"
#include "cuda/driver/device_memory.h"
#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// Words of the hosts of a group's ranks, in memory that all have mapped, zeroed at first.
struct GroupWords {
  static constexpr std::uint64_t kNumLaunches = 64;
  /// Of a rank. Only the pages of those that exist are in memory.
  static constexpr std::size_t kMaxAllocations = 4096;

  struct Launch {                                 ///< of DeviceWatch
    std::atomic<std::uint64_t> number_and_state;  ///< 2 * (number + 1), odd while it is written
    std::atomic<std::uint32_t> header[kHeaderWords];
  };
  struct alignas(kLineBytes) OfRank {
    std::atomic<std::uint64_t> num_launches;
    alignas(kLineBytes) Launch launches[kNumLaunches];
  };
  struct OfAllocation {                        ///< of PeerAllocations, written by its owner
    std::atomic<std::uint64_t> version;        ///< odd while there is one
    std::atomic<std::uint32_t> num_following;  ///< peers that know this version
    std::atomic<std::uint32_t> failed;         ///< a bit for each of these that could not map it
    std::atomic<std::uint64_t> first_call;     ///< the last of the calls in which peers mapped it
    PeerAllocation allocation;
  };

  OfRank ranks[kMaxRanks];
  std::atomic<std::uint32_t> has_captured;  ///< some rank has a graph; replays have no numbers
  alignas(kLineBytes) std::atomic<std::uint64_t> num_announced;  ///< versions of all allocations
  OfAllocation allocations[kMaxRanks][kMaxAllocations];
};

/// A rank's record of its device and its process.
struct RankPlace {
  DeviceUuid device = {};
  RecordText<64> host_id;
  RecordText<112> bootstrap_address;
  std::uint64_t process = 0;  ///< a digest of its address, which has random bits
  int num_multiprocessors = 0;
  bool has_mps = false;
  bool has_multicast = false;
  bool maps_tensors = true;
  std::size_t free_bytes = 0;  ///< of its device
  RecordText<256> problem;
};

}  // namespace ringcomm::cuda
