#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "transport/process.h"
#include "transport/shm/fd.h"

namespace ringcomm::shm {

/// Which bytes of a range are in use: best fit, with adjacent free blocks merged. Works on offsets
/// and accesses no memory. Not thread-safe.
class BlockList {
 public:
  explicit BlockList(std::size_t num_bytes) : free_{{0, num_bytes}} {}

  /// The offset of a free block, a multiple of `alignment_bytes` (a power of two); nothing when no
  /// free range is long enough.
  std::optional<std::size_t> allocate(std::size_t num_bytes, std::size_t alignment_bytes);
  /// Frees the block at `offset`; returns its size. Does nothing, and returns 0, if it is retired.
  std::size_t deallocate(std::size_t offset);
  /// Never allocates the block around `offset` again.
  void retire(std::size_t offset);

  /// The free ranges: offset and size.
  const std::map<std::size_t, std::size_t>& free_ranges() const { return free_; }
  std::size_t num_blocks() const { return used_.size(); }

 private:
  std::map<std::size_t, std::size_t> free_;  // size by offset
  std::map<std::size_t, std::size_t> used_;  // size by offset; 0 if retired
};

/// The location of a buffer in the shared memory of its process; valid in other processes.
struct ArenaLocation {
  std::uint64_t region_id = 0;  ///< counted from 1; 0 is nowhere
  std::uint64_t offset_bytes = 0;

  bool is_somewhere() const { return region_id != 0; }
};

/// The memory of this process that other processes of the host can map: buffers are allocated from
/// it one by one, peers map it region by region (PeerMemory).
///
/// A region is a memfd that the Bootstrap offers. Each is as large as all earlier ones together, so
/// there are few; a peer that has mapped one can access every later buffer in it. Regions exist
/// until the process ends; only their pages are returned to the system.
///
/// All functions may be called from any thread. A forked child has an arena of its own; blocks that
/// it inherited belong to the parent, and are shared with it.
class SharedArena {
 public:
  using Clock = std::chrono::steady_clock;

  /// Sizes in bytes.
  struct Usage {
    std::size_t num_blocks = 0;
    std::size_t allocated_bytes = 0;  ///< in blocks
    std::size_t kept_bytes = 0;       ///< free, and not returned to the system yet
    std::size_t num_regions = 0;
    std::size_t mapped_bytes = 0;  ///< of regions; address space, of which touched pages count
  };

  /// The arena of this process.
  static SharedArena& instance() { return arenas_.get(); }
  /// Null if nothing was ever allocated; does not create the arena.
  static SharedArena* find() { return arenas_.find(); }

  /// `num_bytes` > 0 of memory, zeroed or not, aligned to 64 bytes at least, to a page from 4 KiB
  /// on. Throws OutOfMemory.
  void* allocate(std::size_t num_bytes);
  /// Does nothing if the block is not of this arena, because it was inherited by fork().
  void deallocate(void* block);

  /// The location of `num_bytes` at `data`; an empty one if they are not in the arena.
  ArenaLocation locate(const void* data, std::size_t num_bytes) const;
  std::byte* address_of(const ArenaLocation& location) const;

  /// Never allocates the block around `location` again: after a failed collective a peer may still
  /// write to it.
  void retire(const ArenaLocation& location);

  Usage usage() const;

  /// Returns free pages to the system, some in each call, if more than 64 MiB were free during the
  /// whole interval (10 s) that ends at `now`. Returns the time until the next call; negative for
  /// none, as long as no more is free. The bootstrap calls it.
  std::chrono::milliseconds tidy(Clock::time_point now);

  /// The key under which a process's Bootstrap offers a region.
  static std::string key_of(std::uint64_t region_id);

  SharedArena() = default;  // for PerProcess

 private:
  // Sizes double from kMinRegionBytes, so more regions would exceed the address space.
  static constexpr std::size_t kMaxRegions = 40;

  struct Region {
    explicit Region(SharedMemory mapping)
        : memory(std::move(mapping)), blocks(memory.num_bytes()) {}

    SharedMemory memory;
    BlockList blocks;
  };

  std::span<const std::unique_ptr<Region>> regions() const {
    return {regions_.data(), num_regions_.load(std::memory_order_acquire)};
  }
  Region& add_region(std::size_t num_bytes);
  void begin_interval(Clock::time_point now);
  bool return_pages();

  static PerProcess<SharedArena> arenas_;

  // Only grows, and a region is complete before it is counted, so locate() needs no lock.
  std::array<std::unique_ptr<Region>, kMaxRegions> regions_;
  std::atomic<std::size_t> num_regions_ = 0;

  mutable std::mutex mutex_;  // guards what follows, and the regions' lists
  std::size_t allocated_bytes_ = 0;
  std::size_t kept_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
  // The interval: its end, if there is one, and the least kept_bytes_ in it.
  std::optional<Clock::time_point> interval_end_;
  std::size_t least_kept_bytes_ = 0;
  std::size_t return_region_ = 0;  // whose pages are being returned, from its end on; 0: none
  std::size_t return_end_ = 0;     // its pages from here on have been returned
};

/// The system has no memory of that size.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

/// The mapped arena of a peer's process. Each region is mapped at the first access to a buffer in
/// it, and unmapped when the last group with that process is destroyed. No descriptor is kept.
/// Functions may be called from any thread.
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
