#include "host/shared_arena.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <thread>

#include "core/errors.h"
#include "host/bootstrap.h"
#include "host/fd.h"

namespace ringcomm::host {
namespace {

constexpr std::size_t kLeastAlignment = 64;
constexpr std::size_t kMinRegionBytes = std::size_t{64} << 20;
// Free memory beyond this returns to the system if it was free during a whole interval.
constexpr std::size_t kMinKeptBytes = std::size_t{64} << 20;
// At most this much in one go, so that allocations wait 20 ms.
constexpr std::size_t kReturnBytes = std::size_t{16} << 20;
constexpr std::chrono::milliseconds kReturnPause{1};

std::string with_gib(std::size_t num_bytes) {
  return std::to_string(num_bytes) + " bytes (" + std::to_string(num_bytes >> 30) + " GiB)";
}

[[noreturn]] void throw_out_of_memory(std::size_t num_bytes, const std::string& why) {
  throw OutOfMemory("can't allocate " + with_gib(num_bytes) + " of shared memory: " + why);
}

// A memfd may be larger than the machine's memory, and filling it kills the process.
void check_fits_machine(std::size_t num_bytes) {
  struct sysinfo info{};
  if (::sysinfo(&info) != 0) return;
  const std::size_t swap_bytes = std::size_t{info.totalswap} * info.mem_unit;
  const std::size_t machine_bytes = std::size_t{info.totalram} * info.mem_unit + swap_bytes;
  if (num_bytes > machine_bytes)
    throw_out_of_memory(num_bytes, "this machine has " + with_gib(machine_bytes));
  const auto& limit = cgroup_limits().memory_bytes;
  if (limit && num_bytes > static_cast<std::size_t>(limit->value) + swap_bytes)
    throw_out_of_memory(num_bytes, "the limit is " + with_gib(limit->value) + " in " + limit->file);
}

}  // namespace

std::optional<std::size_t> BlockList::allocate(std::size_t num_bytes, std::size_t alignment_bytes) {
  const auto aligned = [&](std::size_t offset) {
    return (offset + alignment_bytes - 1) & ~(alignment_bytes - 1);
  };
  auto fit = blocks_.end();
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    const auto& [begin, found] = *block;
    if (found.state != State::kFree || found.num_bytes < aligned(begin) - begin + num_bytes)
      continue;
    if (fit == blocks_.end() || found.num_bytes < fit->second.num_bytes) fit = block;
  }
  if (fit == blocks_.end()) return std::nullopt;
  const std::size_t begin = fit->first, offset = aligned(begin);
  const std::size_t end = begin + fit->second.num_bytes;
  if (offset > begin) fit->second.num_bytes = offset - begin;
  if (end > offset + num_bytes) blocks_[offset + num_bytes] = {end - offset - num_bytes};
  blocks_[offset] = {num_bytes, State::kUsed};
  return offset;
}

std::size_t BlockList::deallocate(std::size_t offset) {
  auto block = blocks_.find(offset);
  if (block->second.num_holds > 0) {
    block->second.state = State::kHeld;
    return 0;
  }
  const std::size_t num_bytes = block->second.num_bytes;
  block->second.state = State::kFree;
  const auto is_free = [](auto one) { return one->second.state == State::kFree; };
  if (block != blocks_.begin() && is_free(std::prev(block))) --block;
  for (auto next = std::next(block); next != blocks_.end() && is_free(next);
       next = blocks_.erase(next))
    block->second.num_bytes += next->second.num_bytes;
  return num_bytes;
}

void BlockList::hold(std::size_t offset) { ++around(offset)->second.num_holds; }

std::size_t BlockList::release(std::size_t offset) {
  const Place place = around(offset);
  const bool is_last = --place->second.num_holds == 0;
  return is_last && place->second.state == State::kHeld ? deallocate(place->first) : 0;
}

constinit PerProcess<SharedArena> SharedArena::arenas_;

std::string SharedArena::key_of(std::uint64_t region_id) {
  return "arena/" + std::to_string(region_id);
}

void* SharedArena::allocate(std::size_t num_bytes) {
  check_fits_machine(num_bytes);
  const std::size_t alignment = num_bytes >= page_bytes() ? page_bytes() : kLeastAlignment;
  const std::size_t block_bytes = (num_bytes + kLeastAlignment - 1) & ~(kLeastAlignment - 1);
  const std::lock_guard lock(mutex_);
  release_held();
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
  ++usage_.num_blocks;
  usage_.kept_bytes -= std::min(usage_.kept_bytes, block_bytes);
  least_kept_bytes_ = std::min(least_kept_bytes_, usage_.kept_bytes);
  return block;
}

void SharedArena::deallocate(void* block) {
  const ArenaLocation location = locate(block, 0);
  if (!location.is_somewhere()) return;
  const std::lock_guard lock(mutex_);
  free_bytes(region_of(location).blocks.deallocate(location.offset_bytes));
}

// Of a block that is free now; 0 if it is not.
void SharedArena::free_bytes(std::size_t num_bytes) {
  if (num_bytes == 0) return;
  --usage_.num_blocks;
  usage_.kept_bytes += num_bytes;
}

ArenaLocation SharedArena::locate(const void* data, std::size_t num_bytes) const {
  for (std::size_t i = 0; i < regions().size(); ++i) {
    const SharedMemory& memory = regions_[i]->memory;
    if (data < memory.data() || data >= memory.data() + memory.num_bytes()) continue;
    const auto offset =
        static_cast<std::size_t>(static_cast<const std::byte*>(data) - memory.data());
    if (num_bytes > memory.num_bytes() - offset) break;
    return {.region_id = regions_[i]->id, .offset_bytes = offset};
  }
  return {};
}

std::byte* SharedArena::address_of(const ArenaLocation& location) const {
  return region_of(location).memory.data() + location.offset_bytes;
}

SharedArena::Region& SharedArena::region_of(const ArenaLocation& location) const {
  return **std::ranges::find(regions(), location.region_id, [](const auto& r) { return r->id; });
}

void SharedArena::hold(const ArenaLocation& location, std::function<bool()> is_over) {
  if (!location.is_somewhere()) return;
  const std::lock_guard lock(mutex_);
  region_of(location).blocks.hold(location.offset_bytes);
  held_.emplace_back(location, std::move(is_over));
}

void SharedArena::release_held() {
  std::erase_if(held_, [this](const auto& held) {
    const auto& [location, is_over] = held;
    if (!is_over()) return false;
    free_bytes(region_of(location).blocks.release(location.offset_bytes));
    return true;
  });
}

SharedArena::Region& SharedArena::add_region(std::size_t num_bytes) {
  const std::size_t idx = regions().size();
  const std::size_t region_bytes =
      std::max({kMinRegionBytes, usage_.mapped_bytes, whole_pages(num_bytes)});
  if (idx == kMaxRegions) throw_out_of_memory(num_bytes, "the address space is full");
  try {
    UniqueFd fd = create_memfd(region_bytes, "ringcomm-shared");
    regions_[idx].reset(new Region{SharedMemory(fd.get(), region_bytes)});
    // Where shmem_enabled is `advise`; elsewhere nothing changes, and a refusal does not matter.
    ::madvise(regions_[idx]->memory.data(), region_bytes, MADV_HUGEPAGE);
    Bootstrap::instance().offer(key_of(regions_[idx]->id), std::move(fd));
  } catch (const Error& error) {
    throw_out_of_memory(num_bytes, error.what());
  }
  usage_.mapped_bytes += region_bytes;
  usage_.num_regions = idx + 1;
  num_regions_.store(idx + 1, std::memory_order_release);
  return *regions_[idx];
}

void SharedArena::trim(Clock::time_point now) {
  std::unique_lock lock(mutex_);
  if (now < next_trim_) return;
  next_trim_ = now + kTrimInterval / 2;
  if (least_kept_bytes_ > kMinKeptBytes) return_pages(lock);
  least_kept_bytes_ = usage_.kept_bytes;
}

// Returns all free pages, those at the end of a region first.
void SharedArena::return_pages(std::unique_lock<std::mutex>& lock) {
  usage_.kept_bytes = 0;
  for (const auto& region : regions()) {
    const auto& blocks = region->blocks.blocks();
    std::size_t returned_from = region->memory.num_bytes();
    for (auto next = blocks.end(); next != blocks.begin();
         next = blocks.lower_bound(returned_from)) {
      const auto& [begin, block] = *std::prev(next);
      const std::size_t end =
          std::min(begin + block.num_bytes, returned_from) / page_bytes() * page_bytes();
      const std::size_t first_page =
          std::max(whole_pages(begin), end - std::min(end, kReturnBytes));
      const bool has_pages = block.state == BlockList::State::kFree && end > first_page;
      returned_from = has_pages ? first_page : begin;
      if (!has_pages) continue;
      host::return_pages(region->memory.data() + first_page, end - first_page);
      lock.unlock();
      std::this_thread::sleep_for(kReturnPause);
      lock.lock();
    }
  }
}

std::byte* PeerMemory::find(const ArenaLocation& location, std::size_t num_bytes,
                            std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  auto region = regions_.find(location.region_id);
  if (region == regions_.end()) {
    const UniqueFd fd = Bootstrap::instance().fetch(
        bootstrap_address_, SharedArena::key_of(location.region_id), patience);
    if (!fd) return nullptr;
    region = regions_.emplace(location.region_id, SharedMemory::of_peer(fd.get())).first;
  }
  const SharedMemory& memory = region->second;
  // A location comes from the peer, so it is checked.
  if (location.offset_bytes > memory.num_bytes() ||
      num_bytes > memory.num_bytes() - location.offset_bytes)
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: a peer's buffer is not inside the memory that it shares");
  return memory.data() + location.offset_bytes;
}

}  // namespace ringcomm::host
