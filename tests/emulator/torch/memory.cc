// Memory of tensors, and its copies.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator/api.h"
#include "emulator/torch/device.h"

namespace ringcomm::emulator {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr unsigned char kPoison = 0xFF;
constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kBlockUnit = 512;  // bytes, and those of the least block
constexpr std::size_t kMaxSmallBytes = kMiB;

/// Blocks share segments, as torch's do, or each is an allocation of its own.
const bool kHasSegments = std::getenv("RINGCOMM_EMULATOR_SEGMENTS") != nullptr;
/// Segments are made of pieces in a range of addresses of their stream's, as torch's expandable
/// ones are.
const bool kHasPieces = std::getenv("RINGCOMM_EMULATOR_PIECES") != nullptr;
constexpr std::size_t kPieceBytes = 2 * kMiB;
constexpr std::size_t kRangeBytes = std::size_t{1} << 30;

constexpr std::size_t round_up(std::size_t num_bytes, std::size_t unit) {
  return (num_bytes + unit - 1) / unit * unit;
}

/// Of the block for a tensor.
std::size_t block_bytes_of(std::size_t num_bytes) {
  return kHasSegments ? round_up(num_bytes, kBlockUnit)
                      : std::bit_ceil(std::max(num_bytes, kBlockUnit));
}

/// Of the segment that is allocated for a block.
std::size_t segment_bytes(std::size_t block_bytes) {
  if (kHasPieces) return round_up(block_bytes, kPieceBytes);
  if (!kHasSegments) return block_bytes;
  if (block_bytes <= kMaxSmallBytes) return 2 * kMiB;
  return block_bytes < 10 * kMiB ? 20 * kMiB : round_up(block_bytes, 2 * kMiB);
}

cuda::DevicePtr address_of(const void* data) { return reinterpret_cast<cuda::DevicePtr>(data); }

/// Pieces of physical memory, each mapped in a place of a range of addresses.
class Range {
 public:
  explicit Range(c10::DeviceIndex device) : device_(device), is_mapped_(kRangeBytes / kPieceBytes) {
    check(driver().mem_address_reserve(&base_, kRangeBytes, 0, 0, 0), "reserve addresses");
  }

  /// Where there is room first. What has been mapped before it fails is unmapped.
  cuda::Result map(cuda::DevicePtr* address, std::size_t num_bytes) {
    const auto num = static_cast<std::ptrdiff_t>(num_bytes / kPieceBytes);
    const auto room = std::search_n(is_mapped_.begin(), is_mapped_.end(), num, false);
    TORCH_CHECK(room != is_mapped_.end(), "emugpu: a range of addresses is full");
    *address = base_ + static_cast<std::size_t>(room - is_mapped_.begin()) * kPieceBytes;
    for (std::size_t done = 0; done < num_bytes; done += kPieceBytes)
      if (const cuda::Result result = map_piece(*address + done); result != cuda::kSuccess) {
        unmap(*address, done);
        return result;
      }
    return cuda::kSuccess;
  }

  void unmap(cuda::DevicePtr address, std::size_t num_bytes) {
    for (std::size_t done = 0; done < num_bytes; done += kPieceBytes) {
      check(driver().mem_unmap(address + done, kPieceBytes), "unmap a piece");
      is_mapped_[(address + done - base_) / kPieceBytes] = false;
    }
  }

  bool contains(cuda::DevicePtr address) const {
    return address >= base_ && address - base_ < kRangeBytes;
  }

 private:
  /// As torch, which lets other processes have it unless this variable says 0.
  cuda::Result map_piece(cuda::DevicePtr address) {
    const char* shares = std::getenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC");
    cuda::MemAllocationProp prop = {};
    prop.type = cuda::kAllocationPinned;
    prop.location = {cuda::kLocationDevice, device_};
    prop.requested_handle_types =
        shares == nullptr || std::strcmp(shares, "0") != 0 ? cuda::kHandlePosixFd : 0;
    cuda::MemoryHandle handle = 0;
    const cuda::Result result = driver().mem_create(&handle, kPieceBytes, &prop, 0);
    if (result != cuda::kSuccess) return result;
    check(driver().mem_map(address, kPieceBytes, 0, handle, 0), "map a piece");
    check(driver().mem_release(handle), "let a piece go with its mapping");
    const cuda::MemAccessDesc access = {prop.location, cuda::kAccessReadWrite};
    check(driver().mem_set_access(address, kPieceBytes, &access, 1), "use a piece");
    is_mapped_[(address - base_) / kPieceBytes] = true;
    return cuda::kSuccess;
  }

  c10::DeviceIndex device_;
  cuda::DevicePtr base_ = 0;
  std::vector<bool> is_mapped_;
};

struct Block {
  std::byte* data = nullptr;
  std::size_t num_bytes = 0;
  c10::Stream owner;
  bool is_small = false;
  bool is_free = false;
  std::size_t counted_bytes = 0;
  Block* before = nullptr;  // in its segment
  Block* after = nullptr;
  std::vector<c10::Stream> users = {};      // recorded, beside the owner
  bool is_captured = false;                 // a graph may use it at any time
  std::vector<c10::Event> used_until = {};  // of a freed block, by its recorded users
};

/// Makes blocks neighbours; null is the end of a segment.
void join(Block* block, Block* after) {
  if (block != nullptr) block->after = after;
  if (after != nullptr) after->before = block;
}

c10::CachingAllocator::Stat& count_of(c10::CachingAllocator::StatArray& counts) {
  return counts[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

/// Memory is returned to the driver by empty_cache() and when there is no more.
class Heap {
 public:
  /// Never destroyed: tensors may go after it.
  static Heap& of(c10::DeviceIndex device) {
    static auto& heaps = *new std::map<c10::DeviceIndex, Heap>();
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    return heaps[device];
  }

  Block* take(std::size_t num_bytes, c10::Stream owner) {
    const cuda::RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    reclaim(owner);
    const std::size_t block_bytes = block_bytes_of(num_bytes);
    const bool is_small = block_bytes <= kMaxSmallBytes;
    Block* block = find_free(block_bytes, is_small, owner);
    if (block == nullptr) block = make_segment(block_bytes, owner);
    const std::size_t left = block->num_bytes - block_bytes;
    if (is_small ? left >= kBlockUnit : left > kMaxSmallBytes) {
      auto* rest = new Block{block->data + block_bytes, left, owner, is_small};
      block->num_bytes = block_bytes;
      join(rest, block->after);
      join(block, rest);
      keep(rest);
    }
    block->is_free = false;
    block->is_captured = is_capturing(owner);
    block->counted_bytes = kHasSegments ? block->num_bytes : num_bytes;
    count_of(counts_.allocated_bytes).increase(block->counted_bytes);
    return block;
  }

  void give_back(Block* block) {
    const cuda::RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    count_of(counts_.allocated_bytes).decrease(block->counted_bytes);
    const auto users = std::exchange(block->users, {});
    if (block->is_captured || is_capturing(block->owner)) return;
    if (std::ranges::any_of(users, is_capturing)) return;
    for (const c10::Stream stream : users) {
      block->used_until.emplace_back(kEmulatedGpu);
      block->used_until.back().record(stream);
    }
    pending_.push_back(block);
  }

  void empty_cache() {
    const cuda::RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    free_segments();
  }

  void add_user(Block* block, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(block->users, stream) == block->users.end())
      block->users.push_back(stream);
  }

  DeviceStats counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

  void reset_peaks() {
    const std::lock_guard lock(mutex_);
    for (auto* counts : {&counts_.allocated_bytes, &counts_.reserved_bytes})
      count_of(*counts).reset_peak();
  }

 private:
  using Place = std::tuple<c10::StreamId, bool, std::size_t, std::byte*>;

  static Place place_of(const Block* block) {
    return {block->owner.id(), block->is_small, block->num_bytes, block->data};
  }

  /// The smallest that is large enough, then the one with the lowest address; null without one.
  Block* find_free(std::size_t block_bytes, bool is_small, c10::Stream owner) {
    const auto found = free_.lower_bound({owner.id(), is_small, block_bytes, nullptr});
    if (found == free_.end()) return nullptr;
    Block* block = found->second;
    if (block->owner != owner || block->is_small != is_small) return nullptr;
    if (!kHasSegments && block->num_bytes != block_bytes) return nullptr;
    free_.erase(found);
    return block;
  }

  /// Makes freed blocks of a stream free for what it is given from now on, as torch's allocator
  /// does: the stream's own order is enough, and recorded users are waited for. Any of them may be
  /// part of the next tensor there, so the stream spoils all.
  void reclaim(c10::Stream owner) {
    if (is_capturing(owner)) return;  // a graph has memory of its own
    std::erase_if(pending_, [&](Block* freed) {
      if (freed->owner != owner || !is_past(freed)) return false;
      fill_bytes(freed->data, kPoison, freed->num_bytes, owner);
      return merge(freed);
    });
  }

  static bool is_past(const Block* freed) {
    return std::ranges::all_of(freed->used_until, [](const auto& event) { return event.query(); });
  }

  void keep(Block* block) {
    block->is_free = true;
    free_.emplace(place_of(block), block);
  }

  /// A freed block and its free neighbours become one.
  bool merge(Block* freed) {
    freed->used_until.clear();
    for (Block* other : {freed->before, freed->after}) {
      if (other == nullptr || !other->is_free) continue;
      free_.erase(place_of(other));
      freed->num_bytes += other->num_bytes;
      if (other == freed->before) {
        freed->data = other->data;
        join(other->before, freed);
      } else {
        join(freed, other->after);
      }
      delete other;
    }
    keep(freed);
    return true;
  }

  void free_segments() {
    std::erase_if(pending_, [this](Block* freed) { return is_past(freed) && merge(freed); });
    std::erase_if(free_, [this](const auto& entry) {
      Block* block = entry.second;
      if (block->before != nullptr || block->after != nullptr) return false;
      synchronize(block->owner);
      const ContextGuard context(block->owner.device_index());
      free_segment(address_of(block->data), block->num_bytes);
      count_of(counts_.reserved_bytes).decrease(block->num_bytes);
      delete block;
      return true;
    });
  }

  cuda::Result allocate_segment(cuda::DevicePtr* address, std::size_t num_bytes,
                                c10::Stream owner) {
    if (!kHasPieces) return driver().mem_alloc(address, num_bytes);
    return ranges_.try_emplace(owner.id(), owner.device_index())
        .first->second.map(address, num_bytes);
  }

  void free_segment(cuda::DevicePtr address, std::size_t num_bytes) {
    for (auto& [stream, range] : ranges_)
      if (range.contains(address)) return range.unmap(address, num_bytes);
    check(driver().mem_free(address), "free the memory of tensors");
  }

  Block* make_segment(std::size_t block_bytes, c10::Stream owner) {
    const std::size_t num_bytes = segment_bytes(block_bytes);
    const ContextGuard context(owner.device_index());
    cuda::DevicePtr address = 0;
    cuda::Result result = allocate_segment(&address, num_bytes, owner);
    if (result == kErrorOutOfMemory && !is_capturing(owner)) {
      ++counts_.num_alloc_retries;
      free_segments();
      result = allocate_segment(&address, num_bytes, owner);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, result != kErrorOutOfMemory,
                     "emugpu out of memory: cannot allocate memory for a tensor of ", block_bytes,
                     " bytes beside ", count_of(counts_.reserved_bytes).current);
    check(result, "allocate memory for a tensor");
    count_of(counts_.reserved_bytes).increase(num_bytes);
    void* data = std::memset(reinterpret_cast<void*>(address), kPoison, num_bytes);
    return new Block{static_cast<std::byte*>(data), num_bytes, owner,
                     block_bytes <= kMaxSmallBytes};
  }

  std::mutex mutex_;
  std::map<Place, Block*> free_;
  std::vector<Block*> pending_;  // freed
  std::map<c10::StreamId, Range> ranges_;
  DeviceStats counts_;
};

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Heap::of(block->owner.device_index()).give_back(block);
}

struct EmulatedGpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t num_bytes) override {
    const c10::DeviceIndex device = current_device();
    const c10::Device owner(kEmulatedGpu, device);
    if (num_bytes == 0) return {nullptr, nullptr, [](void*) {}, owner};
    Block* block = Heap::of(device).take(num_bytes, current_stream(device));
    return {block->data, block, &delete_block, owner};
  }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    copy_bytes(to, from, num_bytes, current_stream(current_device()));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { Heap::of(current_device()).empty_cache(); }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_stream(memory, stream);
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return Heap::of(device).counts(); }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // nobody asks for them
  void resetPeakStats(c10::DeviceIndex device) override { Heap::of(device).reset_peaks(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const ContextGuard context(device);
    std::size_t num_free = 0, num_all = 0;
    check(driver().mem_get_info(&num_free, &num_all), "ask for the free memory");
    return {num_free, num_all};
  }
};

}  // namespace

c10::Allocator& allocator() {
  static auto& one = *new EmulatedGpuAllocator();
  return one;
}

void record_stream(const c10::DataPtr& memory, c10::Stream stream) {
  // Other memory, such as a tensor of another process's memory, does not belong to the allocator.
  if (memory.get_deleter() != &delete_block) return;
  auto* block = static_cast<Block*>(memory.get_context());
  if (block->owner != stream) Heap::of(block->owner.device_index()).add_user(block, stream);
}

void copy_bytes(void* to, const void* from, std::size_t num_bytes, c10::Stream stream) {
  if (num_bytes == 0) return;
  const ContextGuard context(stream.device_index());
  check(driver().memcpy_async(address_of(to), address_of(from), num_bytes, handle_of(stream)),
        "copy a tensor");
}

void fill_bytes(void* to, unsigned char value, std::size_t num_bytes, c10::Stream stream) {
  if (num_bytes == 0) return;
  const ContextGuard context(stream.device_index());
  check(driver().memset_d8_async(address_of(to), value, num_bytes, handle_of(stream)),
        "fill a tensor");
}

}  // namespace ringcomm::emulator
