#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "communicator/records.h"
#include "core/arch.h"
#include "cuda/driver/device_memory.h"
#include "cuda/kernels/staging.h"

namespace ringcomm::cuda {

/// Why a group's ranks cannot reach each other's GPU memory: the same text on all of them, so that
/// all take the same other way.
struct Unavailable : std::runtime_error {
  using runtime_error::runtime_error;
};

/// Text in a record; truncated if it does not fit.
template <std::size_t kBytes>
struct RecordText {
  char bytes[kBytes] = {};

  RecordText() = default;
  explicit RecordText(const std::string& text) {
    std::memcpy(bytes, text.data(), std::min(text.size(), kBytes - 1));
  }
  std::string str() const { return bytes; }
};

/// Runs a local step. Returns the error text, which is then exchanged with all ranks; empty on
/// success.
template <class Body>
RecordText<256> attempt(const Body& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return RecordText<256>(text.empty() ? "unknown error" : text);
  }
}

/// Throws Unavailable with the first `problem` of the ranks' records, if any has one.
template <class Record>
void check_problems(const std::vector<Record>& records) {
  for (std::size_t rank = 0; rank < records.size(); ++rank)
    if (const std::string problem = records[rank].problem.str(); !problem.empty())
      throw Unavailable("rank " + std::to_string(rank) + ": " + problem);
}

/// Collective: tells all how attempts went.
inline void agree(RecordExchange& exchange, const RecordText<256>& problem) {
  struct Record {
    RecordText<256> problem;
  };
  check_problems(exchange.all_gather(Record{problem}));
}

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
  std::atomic<std::uint32_t> has_captured;  ///< whether any rank has captured a call
  alignas(kLineBytes) std::atomic<std::uint64_t> num_announced;  ///< versions of all allocations
  OfAllocation allocations[kMaxRanks][kMaxAllocations];
};

/// A rank's record of its device and its process.
struct RankPlace {
  DeviceUuid device = {};
  RecordText<64> host_id;
  RecordText<112> bootstrap_address;
  std::uint64_t process = 0;  ///< random bits of it, not its pid
  int num_multiprocessors = 0;
  bool has_mps = false;
  bool maps_tensors = true;
  std::uint64_t free_bytes = 0;  ///< of its device
  RecordText<256> problem;
};

}  // namespace ringcomm::cuda
