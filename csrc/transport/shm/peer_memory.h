#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "transport/shm/shared_arena.h"
#include "transport/shm/shared_memory.h"

namespace ringcomm::shm {

/// The arena of a peer's process, as this process sees it: its regions, each mapped when a buffer
/// in it is first asked for, and unmapped when the last group with that process goes. No descriptor
/// is kept.
///
/// All functions may be called from any thread.
class PeerMemory {
 public:
  /// The one of the process whose hub is at `hub_address`, shared by all groups.
  static std::shared_ptr<PeerMemory> of(const std::string& hub_address);

  explicit PeerMemory(std::string hub_address) : hub_address_(std::move(hub_address)) {}

  /// The address here of `num_bytes` there; null when the process does not hand over the region in
  /// `patience`. Throws Error.
  std::byte* find(const ArenaLocation& location, std::size_t num_bytes,
                  std::chrono::milliseconds patience);

 private:
  std::string hub_address_;
  std::mutex mutex_;
  std::map<std::uint64_t, SharedMemory> regions_;
};

}  // namespace ringcomm::shm
