#include "transport/shm/shared_arena.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "transport/shm/bootstrap.h"

namespace ringcomm::shm {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kLeastAlignment = 64;
constexpr std::size_t kMinRegionBytes = std::size_t{64} << 20;
// Free memory that is kept instead of returned to the system. Otherwise a program that allocates a
// buffer in every step would pay a page fault (0.5 us for 4 KiB) per page and step.
constexpr std::size_t kMaxKeptBytes = std::size_t{64} << 20;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::size_t alignment_of(std::size_t num_bytes) {
  return num_bytes >= kPageBytes ? kPageBytes : kLeastAlignment;
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
  const std::size_t machine_bytes =
      (std::size_t{info.totalram} + std::size_t{info.totalswap}) * info.mem_unit;
  if (num_bytes > machine_bytes)
    throw_out_of_memory(num_bytes, "this machine has " + std::to_string(machine_bytes));
}

}  // namespace

constinit PerProcess<SharedArena> SharedArena::arenas_;

std::string SharedArena::key_of(std::uint64_t region_id) {
  return "arena/" + std::to_string(region_id);
}

void* SharedArena::allocate(std::size_t num_bytes) {
  check_fits_machine(num_bytes);
  const std::size_t alignment = alignment_of(num_bytes);
  const std::size_t block_bytes = round_up(num_bytes, kLeastAlignment);
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
  allocated_bytes_ += block_bytes;
  kept_bytes_ -= std::min(kept_bytes_, block_bytes);
  return region->begin() + *offset;
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
  if (kept_bytes_ > kMaxKeptBytes) give_back_pages();
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
      std::max({kMinRegionBytes, mapped_bytes_, round_up(num_bytes, kPageBytes)});
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

void SharedArena::give_back_pages() {
  const std::size_t num_regions = num_regions_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < num_regions; ++i) {
    const Region& region = *regions_[i];
    for (const auto& [begin, num_bytes] : region.blocks.free_ranges()) {
      const std::size_t first_page = round_up(begin, kPageBytes);
      const std::size_t end = (begin + num_bytes) / kPageBytes * kPageBytes;
      // A failure only leaves unused memory allocated.
      if (end > first_page) ::madvise(region.begin() + first_page, end - first_page, MADV_REMOVE);
    }
  }
  kept_bytes_ = 0;
}

}  // namespace ringcomm::shm
