#include "transport/shm/shared_arena.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/errors.h"
#include "transport/cgroup_limits.h"
#include "transport/page_bytes.h"
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

std::size_t alignment_of(std::size_t num_bytes) {
  return num_bytes >= page_bytes() ? page_bytes() : kLeastAlignment;
}

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

}  // namespace

constinit PerProcess<SharedArena> SharedArena::arenas_;

std::string SharedArena::key_of(std::uint64_t region_id) {
  return "arena/" + std::to_string(region_id);
}

void* SharedArena::allocate(std::size_t num_bytes) {
  check_fits_machine(num_bytes);
  const std::size_t alignment = alignment_of(num_bytes);
  const std::size_t block_bytes =
      (num_bytes + kLeastAlignment - 1) / kLeastAlignment * kLeastAlignment;
  const std::lock_guard lock(mutex_);
  std::optional<std::size_t> offset;
  Region* region = nullptr;
  const std::size_t num_regions = num_regions_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < num_regions && !offset; ++i) {
    region = regions_[i].get();
    offset = region->blocks.allocate(block_bytes, alignment);
  }
  if (!offset) {
    region = &add_region(block_bytes);
    offset = region->blocks.allocate(block_bytes, alignment);
  }
  std::byte* block = region->begin() + *offset;
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
  Region* region = region_of(block);
  if (region == nullptr) return;
  const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(block) - region->begin());
  const std::lock_guard lock(mutex_);
  if (region->retired.contains(offset)) return;
  const std::size_t block_bytes = region->blocks.deallocate(offset);
  allocated_bytes_ -= block_bytes;
  kept_bytes_ += block_bytes;
  if (interval_end_ || kept_bytes_ <= kMinKeptBytes) return;
  begin_interval(Clock::now());
  Bootstrap::instance().call_while_idle([] { return SharedArena::instance().tidy(Clock::now()); });
}

ArenaLocation SharedArena::locate(const void* data, std::size_t num_bytes) const {
  const std::size_t num_regions = num_regions_.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < num_regions; ++i) {
    const Region& region = *regions_[i];
    if (!region.contains(data)) continue;
    const auto offset =
        static_cast<std::size_t>(static_cast<const std::byte*>(data) - region.begin());
    if (num_bytes > region.memory.num_bytes() - offset) break;
    return {.region_id = i + 1, .offset_bytes = offset};
  }
  return {};
}

std::byte* SharedArena::address_of(const ArenaLocation& location) const {
  return regions_[location.region_id - 1]->begin() + location.offset_bytes;
}

void SharedArena::retire(const ArenaLocation& location) {
  if (!location.is_somewhere()) return;
  Region& region = *regions_[location.region_id - 1];
  const std::lock_guard lock(mutex_);
  if (const auto offset = region.blocks.block_around(location.offset_bytes))
    region.retired.insert(*offset);
}

SharedArena::Usage SharedArena::usage() const {
  const std::lock_guard lock(mutex_);
  Usage usage{.allocated_bytes = allocated_bytes_,
              .kept_bytes = kept_bytes_,
              .num_regions = num_regions_.load(std::memory_order_relaxed),
              .mapped_bytes = mapped_bytes_};
  for (std::size_t i = 0; i < usage.num_regions; ++i)
    usage.num_blocks += regions_[i]->blocks.num_blocks();
  return usage;
}

SharedArena::Region* SharedArena::region_of(const void* data) const {
  const std::size_t num_regions = num_regions_.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < num_regions; ++i)
    if (regions_[i]->contains(data)) return regions_[i].get();
  return nullptr;
}

SharedArena::Region& SharedArena::add_region(std::size_t num_bytes) {
  const std::size_t idx = num_regions_.load(std::memory_order_relaxed);
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
  if (least_kept_bytes_ > kMinKeptBytes) {
    return_region_ = num_regions_.load(std::memory_order_relaxed);
    return_end_ = kRegionEnd;
    kept_bytes_ = 0;
    interval_end_.reset();
    return kReturnPause;
  }
  if (kept_bytes_ > kMinKeptBytes) {
    begin_interval(now);
    return kTidyInterval;
  }
  interval_end_.reset();
  return kNever;
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
      ::madvise(region.begin() + first_page, end - first_page, MADV_REMOVE);
      return true;
    }
  }
  return false;
}

}  // namespace ringcomm::shm
