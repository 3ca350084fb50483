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

/// The mapped arena of a peer's process. Each region is mapped at the first access to a buffer in
/// it, and unmapped when the last group with that process is destroyed. No descriptor is kept.
///
/// All functions may be called from any thread.
class PeerMemory {
 public:
  /// The one of the process whose bootstrap is at `bootstrap_address`, shared by all groups.
  static std::shared_ptr<PeerMemory> of(const std::string& bootstrap_address);

  explicit PeerMemory(std::string bootstrap_address)
      : bootstrap_address_(std::move(bootstrap_address)) {}

  /// The address here of `num_bytes` there; null when the process does not hand over the region in
  /// `patience`. Throws Error.
  std::byte* find(const ArenaLocation& location, std::size_t num_bytes,
                  std::chrono::milliseconds patience);

 private:
  std::string bootstrap_address_;
  std::mutex mutex_;
  std::map<std::uint64_t, SharedMemory> regions_;
};

}  // namespace ringcomm::shm
