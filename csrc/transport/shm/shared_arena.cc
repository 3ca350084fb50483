#include "transport/shm/shared_arena.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "core/errors.h"
#include "transport/shm/bootstrap.h"

namespace ringcomm::shm {
namespace {

constexpr std::size_t kLeastAlignment = 64;
constexpr std::size_t kMinRegionBytes = std::size_t{64} << 20;
// Free memory that is kept even if it is not used. More is kept for as long as it is used again and
// again: a buffer of 100 MiB in every step would cost 0.4 s of page faults and returns per step.
constexpr std::size_t kMinKeptBytes = std::size_t{64} << 20;
// Memory that was free during a whole interval returns to the system.
constexpr std::chrono::seconds kTidyInterval{10};
// At most this much in one go, so that allocations and the bootstrap's other work wait 20 ms.
constexpr std::size_t kReturnBytes = std::size_t{16} << 20;
constexpr std::chrono::milliseconds kReturnPause{1};
constexpr std::chrono::milliseconds kNever{-1};
constexpr std::size_t kRegionEnd = std::numeric_limits<std::size_t>::max();

[[noreturn]] void throw_out_of_memory(std::size_t num_bytes, const std::string& why) {
  throw OutOfMemory("can't allocate shared memory: you tried to allocate " +
                    std::to_string(num_bytes) + " bytes; " + why);
}

// A memfd may be larger than the machine's memory, and filling it kills the process. So sizes that
// can never fit are refused, as by the system's allocator.
void check_fits_machine(std::size_t num_bytes) {
  struct sysinfo info{};
  if (::sysinfo(&info) != 0) return;
  const std::size_t swap_bytes = std::size_t{info.totalswap} * info.mem_unit;
  const std::size_t machine_bytes = std::size_t{info.totalram} * info.mem_unit + swap_bytes;
  if (num_bytes > machine_bytes)
    throw_out_of_memory(num_bytes, "this machine has " + std::to_string(machine_bytes));
  const auto& limit = cgroup_limits().memory_bytes;
  if (limit && num_bytes > static_cast<std::size_t>(limit->value) + swap_bytes)
    throw_out_of_memory(num_bytes,
                        "the limit is " + std::to_string(limit->value) + " (" + limit->file + ")");
}

struct PeerMemories {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<PeerMemory>> all;  // by the bootstrap's address
};
constinit PerProcess<PeerMemories> peer_memories;

// A location comes from the peer, so it is checked.
void check_inside(const ArenaLocation& location, std::size_t num_bytes, std::size_t region_bytes) {
  if (location.offset_bytes > region_bytes || num_bytes > region_bytes - location.offset_bytes)
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: a peer's buffer is not inside the memory that it shares");
}

}  // namespace

std::optional<std::size_t> BlockList::allocate(std::size_t num_bytes, std::size_t alignment_bytes) {
  const auto aligned = [&](std::size_t offset) {
    return (offset + alignment_bytes - 1) & ~(alignment_bytes - 1);
  };
  auto fit = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [begin, range_bytes] = *range;
    if (range_bytes < aligned(begin) - begin + num_bytes) continue;
    if (fit == free_.end() || range_bytes < fit->second) fit = range;
  }
  if (fit == free_.end()) return std::nullopt;
  const std::size_t offset = aligned(fit->first);
  const std::size_t end = fit->first + fit->second;
  if (offset > fit->first)
    fit->second = offset - fit->first;
  else
    free_.erase(fit);
  if (end > offset + num_bytes) free_.emplace(offset + num_bytes, end - offset - num_bytes);
  used_.emplace(offset, num_bytes);
  return offset;
}

std::size_t BlockList::deallocate(std::size_t offset) {
  const auto block = used_.find(offset);
  const std::size_t num_bytes = block->second;
  if (num_bytes == 0) return 0;
  used_.erase(block);
  auto range = free_.emplace(offset, num_bytes).first;
  if (const auto next = std::next(range);
      next != free_.end() && next->first == offset + num_bytes) {
    range->second += next->second;
    free_.erase(next);
  }
  if (range == free_.begin()) return num_bytes;
  if (const auto previous = std::prev(range); previous->first + previous->second == offset) {
    previous->second += range->second;
    free_.erase(range);
  }
  return num_bytes;
}

void BlockList::retire(std::size_t offset) {
  const auto next = used_.upper_bound(offset);
  if (next == used_.begin()) return;
  if (const auto block = std::prev(next); offset - block->first < block->second) block->second = 0;
}

constinit PerProcess<SharedArena> SharedArena::arenas_;

std::string SharedArena::key_of(std::uint64_t region_id) {
  return "arena/" + std::to_string(region_id);
}

void* SharedArena::allocate(std::size_t num_bytes) {
  check_fits_machine(num_bytes);
  const std::size_t alignment = num_bytes >= page_bytes() ? page_bytes() : kLeastAlignment;
  const std::size_t block_bytes =
      (num_bytes + kLeastAlignment - 1) / kLeastAlignment * kLeastAlignment;
  const std::lock_guard lock(mutex_);
  std::optional<std::size_t> offset;
  Region* region = nullptr;
  for (const auto& next : regions()) {
    region = next.get();
    offset = region->blocks.allocate(block_bytes, alignment);
    if (offset) break;
  }
  if (!offset) {
    region = &add_region(block_bytes);
    offset = region->blocks.allocate(block_bytes, alignment);
  }
  std::byte* block = region->memory.data() + *offset;
  try {
    reserve_pages(block, block_bytes);
  } catch (const Error& error) {
    region->blocks.deallocate(*offset);
    throw_out_of_memory(num_bytes, error.what());
  }
  allocated_bytes_ += block_bytes;
  kept_bytes_ -= std::min(kept_bytes_, block_bytes);
  least_kept_bytes_ = std::min(least_kept_bytes_, kept_bytes_);
  return block;
}

void SharedArena::deallocate(void* block) {
  const ArenaLocation location = locate(block, 0);
  if (!location.is_somewhere()) return;
  const std::lock_guard lock(mutex_);
  const std::size_t block_bytes =
      regions_[location.region_id - 1]->blocks.deallocate(location.offset_bytes);
  allocated_bytes_ -= block_bytes;
  kept_bytes_ += block_bytes;
  if (interval_end_ || kept_bytes_ <= kMinKeptBytes) return;
  begin_interval(Clock::now());
  Bootstrap::instance().call_while_idle([] { return SharedArena::instance().tidy(Clock::now()); });
}

ArenaLocation SharedArena::locate(const void* data, std::size_t num_bytes) const {
  for (std::size_t i = 0; i < regions().size(); ++i) {
    const SharedMemory& memory = regions_[i]->memory;
    if (data < memory.data() || data >= memory.data() + memory.num_bytes()) continue;
    const auto offset =
        static_cast<std::size_t>(static_cast<const std::byte*>(data) - memory.data());
    if (num_bytes > memory.num_bytes() - offset) break;
    return {.region_id = i + 1, .offset_bytes = offset};
  }
  return {};
}

std::byte* SharedArena::address_of(const ArenaLocation& location) const {
  return regions_[location.region_id - 1]->memory.data() + location.offset_bytes;
}

void SharedArena::retire(const ArenaLocation& location) {
  if (!location.is_somewhere()) return;
  const std::lock_guard lock(mutex_);
  regions_[location.region_id - 1]->blocks.retire(location.offset_bytes);
}

SharedArena::Usage SharedArena::usage() const {
  const std::lock_guard lock(mutex_);
  Usage usage{.allocated_bytes = allocated_bytes_,
              .kept_bytes = kept_bytes_,
              .num_regions = regions().size(),
              .mapped_bytes = mapped_bytes_};
  for (const auto& region : regions()) usage.num_blocks += region->blocks.num_blocks();
  return usage;
}

SharedArena::Region& SharedArena::add_region(std::size_t num_bytes) {
  const std::size_t idx = regions().size();
  const std::size_t region_bytes =
      std::max({kMinRegionBytes, mapped_bytes_, whole_pages(num_bytes)});
  if (idx == kMaxRegions) throw_out_of_memory(num_bytes, "the address space is full");
  try {
    UniqueFd fd = create_memfd(region_bytes, "ringcomm-shared");
    regions_[idx] = std::make_unique<Region>(SharedMemory(fd.get(), region_bytes));
    Bootstrap::instance().offer(key_of(idx + 1), std::move(fd));
  } catch (const Error& error) {
    throw_out_of_memory(num_bytes, error.what());
  }
  mapped_bytes_ += region_bytes;
  num_regions_.store(idx + 1, std::memory_order_release);
  return *regions_[idx];
}

void SharedArena::begin_interval(Clock::time_point now) {
  interval_end_ = now + kTidyInterval;
  least_kept_bytes_ = kept_bytes_;
}

std::chrono::milliseconds SharedArena::tidy(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (return_region_ > 0 && return_pages()) return kReturnPause;
  if (!interval_end_) return kNever;
  if (now < *interval_end_)
    return std::chrono::ceil<std::chrono::milliseconds>(*interval_end_ - now);
  interval_end_.reset();
  if (least_kept_bytes_ > kMinKeptBytes) {
    return_region_ = regions().size();
    return_end_ = kRegionEnd;
    kept_bytes_ = 0;
    return kReturnPause;
  }
  if (kept_bytes_ <= kMinKeptBytes) return kNever;
  begin_interval(now);
  return kTidyInterval;
}

// Returns the last free pages before return_end_ of return_region_; false if there are none.
bool SharedArena::return_pages() {
  for (; return_region_ > 0; --return_region_, return_end_ = kRegionEnd) {
    const Region& region = *regions_[return_region_ - 1];
    const auto& ranges = region.blocks.free_ranges();
    for (auto next = ranges.lower_bound(return_end_); next != ranges.begin();) {
      const auto [begin, num_bytes] = *--next;
      const std::size_t end =
          std::min(begin + num_bytes, return_end_) / page_bytes() * page_bytes();
      const std::size_t first_page =
          std::max(whole_pages(begin), end - std::min(end, kReturnBytes));
      return_end_ = first_page;
      if (end <= first_page) continue;
      // A failure only leaves unused memory allocated.
      ::madvise(region.memory.data() + first_page, end - first_page, MADV_REMOVE);
      return true;
    }
  }
  return false;
}

std::shared_ptr<PeerMemory> PeerMemory::of(const std::string& bootstrap_address) {
  PeerMemories& registry = peer_memories.get();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.all, [](const auto& item) { return item.second.expired(); });
  std::weak_ptr<PeerMemory>& known = registry.all[bootstrap_address];
  std::shared_ptr<PeerMemory> memory = known.lock();
  if (memory == nullptr) known = memory = std::make_shared<PeerMemory>(bootstrap_address);
  return memory;
}

std::byte* PeerMemory::find(const ArenaLocation& location, std::size_t num_bytes,
                            std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  auto region = regions_.find(location.region_id);
  if (region == regions_.end()) {
    const UniqueFd fd = Bootstrap::instance().fetch(
        bootstrap_address_, SharedArena::key_of(location.region_id), patience);
    if (!fd) return nullptr;
    check_sealed(fd.get());
    const std::size_t num_bytes_there = size_of_memfd(fd.get());
    check_inside(location, num_bytes, num_bytes_there);
    region = regions_.emplace(location.region_id, SharedMemory(fd.get(), num_bytes_there)).first;
  }
  check_inside(location, num_bytes, region->second.num_bytes());
  return region->second.data() + location.offset_bytes;
}

}  // namespace ringcomm::shm
