// Memory of tensors, and its copies.
#include <c10/core/Event.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "emulator/torch/device.h"

namespace ringcomm::emulator {
namespace {

constexpr unsigned char kPoison = 0xFF;
constexpr std::size_t kMinBlockBytes = 512;

cuda::DevicePtr address_of(const void* data) { return reinterpret_cast<cuda::DevicePtr>(data); }

struct Block {
  void* data = nullptr;
  std::size_t capacity = 0;
  std::size_t num_bytes = 0;  // as asked for
  c10::Stream owner;
  std::vector<c10::Stream> users = {};      // recorded, beside the owner
  bool is_captured = false;                 // a graph may use it at any time
  std::vector<c10::Event> used_until = {};  // of a freed block, by its recorded users
};

/// Blocks are returned to the driver by empty_cache() alone.
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
    const std::size_t capacity = std::bit_ceil(std::max(num_bytes, kMinBlockBytes));
    std::vector<Block*>& reusable = free_[{owner.id(), capacity}];
    if (reusable.empty()) reusable.push_back(make(capacity, owner));
    Block* block = reusable.back();
    reusable.pop_back();
    block->num_bytes = num_bytes;
    block->is_captured = is_capturing(owner);
    allocated_bytes += num_bytes;
    return block;
  }

  void give_back(Block* block) {
    const cuda::RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    allocated_bytes -= block->num_bytes;
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
    std::erase_if(pending_, [this](Block* freed) { return is_past(freed) && keep(freed); });
    for (auto& [place, blocks] : free_)
      for (Block* block : std::exchange(blocks, {})) {
        synchronize(block->owner);
        const ContextGuard context(block->owner.device_index());
        check(driver().mem_free(address_of(block->data)), "free the memory of tensors");
        delete block;
      }
  }

  void add_user(Block* block, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(block->users, stream) == block->users.end())
      block->users.push_back(stream);
  }

  std::atomic<std::size_t> allocated_bytes = 0;

 private:
  /// Makes freed blocks of a stream free for what it is given from now on, as torch's allocator
  /// does: the stream's own order is enough, and recorded users are waited for. Any of them may be
  /// part of the next tensor there, so the stream spoils all.
  void reclaim(c10::Stream owner) {
    if (is_capturing(owner)) return;  // a graph has memory of its own
    std::erase_if(pending_, [&](Block* freed) {
      if (freed->owner != owner || !is_past(freed)) return false;
      fill_bytes(freed->data, kPoison, freed->capacity, owner);
      return keep(freed);
    });
  }

  static bool is_past(const Block* freed) {
    return std::ranges::all_of(freed->used_until, [](const auto& event) { return event.query(); });
  }

  bool keep(Block* freed) {
    freed->used_until.clear();
    free_[{freed->owner.id(), freed->capacity}].push_back(freed);
    return true;
  }

  static Block* make(std::size_t capacity, c10::Stream owner) {
    const ContextGuard context(owner.device_index());
    cuda::DevicePtr address = 0;
    check(driver().mem_alloc(&address, capacity), "allocate memory for a tensor");
    void* data = std::memset(reinterpret_cast<void*>(address), kPoison, capacity);
    return new Block{.data = data, .capacity = capacity, .owner = owner};
  }

  std::mutex mutex_;
  std::map<std::pair<c10::StreamId, std::size_t>, std::vector<Block*>> free_;  // and its capacity
  std::vector<Block*> pending_;                                                // freed
};

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Heap::of(block->owner.device_index()).give_back(block);
}

struct EmulatedGpuAllocator final : c10::Allocator {
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

void empty_cache() { Heap::of(current_device()).empty_cache(); }

std::size_t allocated_bytes(c10::DeviceIndex device) { return Heap::of(device).allocated_bytes; }

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
