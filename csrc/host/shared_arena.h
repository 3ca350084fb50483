#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/process.h"
#include "host/shared_memory.h"

namespace ringcomm::host {

/// Which bytes of a range are in use: best fit, with adjacent free blocks merged. Not thread-safe.
class BlockList {
 public:
  enum class State : std::uint8_t { kFree, kUsed, kHeld };
  struct Block {
    std::size_t num_bytes;
    State state = State::kFree;  // kHeld: it would be free without its holds
    std::size_t num_holds = 0;
  };

  explicit BlockList(std::size_t num_bytes) : blocks_{{0, {num_bytes}}} {}

  /// The offset of a free block, a multiple of `alignment_bytes` (a power of two), if there is one.
  std::optional<std::size_t> allocate(std::size_t num_bytes, std::size_t alignment_bytes);
  /// Frees the block at `offset`; returns its size, or 0 if that is to wait for release().
  std::size_t deallocate(std::size_t offset);
  /// The block around `offset` is not allocated again before as many calls of release().
  void hold(std::size_t offset);
  /// Returns the size of the block if this frees it, else 0.
  std::size_t release(std::size_t offset);

  /// All blocks, by offset; no free one follows another.
  const std::map<std::size_t, Block>& blocks() const { return blocks_; }

 private:
  using Place = std::map<std::size_t, Block>::iterator;
  Place around(std::size_t offset) { return std::prev(blocks_.upper_bound(offset)); }

  std::map<std::size_t, Block> blocks_;
};

/// The location of a buffer in the shared memory of its process; valid in other processes.
struct ArenaLocation {
  std::uint64_t region_id = 0;  ///< random, so that only who is told can fetch it; 0 is nowhere
  std::uint64_t offset_bytes = 0;

  bool is_somewhere() const { return region_id != 0; }
};

/// The memory of this process that other processes of the host can map: buffers are allocated from
/// it one by one, peers map it region by region (PeerMemory). A forked child has an arena of its
/// own; blocks that it inherited are the parent's. Functions may be called from any thread.
class SharedArena {
 public:
  using Clock = std::chrono::steady_clock;
  /// How long memory of the process must be unused before it returns to the system: pages that are
  /// used in every step would be faulted in again in every step.
  static constexpr std::chrono::seconds kTrimInterval{10};

  /// Sizes in bytes.
  struct Usage {
    std::size_t num_blocks = 0;
    std::size_t kept_bytes = 0;  ///< free, and not returned to the system yet
    std::size_t num_regions = 0;
    std::size_t mapped_bytes = 0;  ///< of regions; address space, of which touched pages count
  };

  static SharedArena& instance() { return arenas_.get(); }
  /// Null if there is none yet.
  static SharedArena* find() { return arenas_.find(); }

  /// `num_bytes` > 0 of memory, zeroed or not, aligned to 64 bytes at least, to a page from 4 KiB
  /// on. Throws OutOfMemory.
  void* allocate(std::size_t num_bytes);
  /// Does nothing if the block is not of this arena, because it was inherited by fork().
  void deallocate(void* block);

  /// The location of `num_bytes` at `data`; an empty one if they are not in the arena.
  ArenaLocation locate(const void* data, std::size_t num_bytes) const;
  std::byte* address_of(const ArenaLocation& location) const;

  /// The block around `location` is not allocated again until `is_over`: a peer may still write to
  /// it. `is_over` is called by allocate(), which may be in any thread.
  void hold(const ArenaLocation& location, std::function<bool()> is_over);

  Usage usage() const {
    const std::lock_guard lock(mutex_);
    return usage_;
  }

  /// Returns free pages to the system if more than 64 MiB were free since the call before this one.
  /// A helper thread calls it every kTrimInterval while the process has made a group; a call that
  /// comes too early does nothing.
  void trim(Clock::time_point now);

  /// The key under which a process's Bootstrap offers a region.
  static std::string key_of(std::uint64_t region_id);

  SharedArena() = default;  // for PerProcess

 private:
  // Sizes double from kMinRegionBytes, so more regions would exceed the address space.
  static constexpr std::size_t kMaxRegions = 40;

  struct Region {
    SharedMemory memory;
    std::uint64_t id = random_number();
    BlockList blocks{memory.num_bytes()};
  };

  std::span<const std::unique_ptr<Region>> regions() const {
    return {regions_.data(), num_regions_.load(std::memory_order_acquire)};
  }
  Region& region_of(const ArenaLocation& location) const;
  Region& add_region(std::size_t num_bytes);
  void free_bytes(std::size_t num_bytes);
  void release_held();
  void return_pages(std::unique_lock<std::mutex>& lock);

  static PerProcess<SharedArena> arenas_;

  // A region is complete before it is counted, so locate() needs no lock.
  std::array<std::unique_ptr<Region>, kMaxRegions> regions_;
  std::atomic<std::size_t> num_regions_ = 0;

  mutable std::mutex mutex_;  // guards what follows, and the regions' lists
  Usage usage_;
  std::vector<std::pair<ArenaLocation, std::function<bool()>>> held_;
  Clock::time_point next_trim_{};
  std::size_t least_kept_bytes_ = 0;  // since the last one
};

/// The system has no memory of that size.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The mapped arena of a peer's process (PeerProcess::memory()): each region from the first access
/// to a buffer in it on. Functions may be called from any thread.
class PeerMemory {
 public:
  explicit PeerMemory(std::string bootstrap_address)
      : bootstrap_address_(std::move(bootstrap_address)) {}

  /// The address here of `num_bytes` there; null when the process does not send the region in
  /// `patience`. Throws Error.
  std::byte* find(const ArenaLocation& location, std::size_t num_bytes,
                  std::chrono::milliseconds patience);

 private:
  std::string bootstrap_address_;
  std::mutex mutex_;
  std::map<std::uint64_t, SharedMemory> regions_;
};

}  // namespace ringcomm::host
