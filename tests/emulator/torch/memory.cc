#include "emulator/torch/memory.h"

#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace ringcomm::emulator {
namespace {

using cuda::check;
using cuda::ContextGuard;
using cuda::driver;

constexpr std::size_t kMinBlockBytes = 512;

struct Block {
  cuda::DevicePtr address = 0;
  std::size_t capacity = 0;
  std::size_t num_bytes = 0;  // as asked for
  c10::Stream owner;
  std::vector<c10::Stream> users = {};         // recorded
  bool is_captured = false;                    // a graph may use it at any time
  std::optional<c10::Event> released_by = {};  // for a freed block that is still in use
};

void* pointer_to(cuda::DevicePtr address) { return reinterpret_cast<void*>(address); }

bool poisons() {
  static const bool does = [] {
    const char* text = std::getenv("RINGCOMM_EMULATOR_POISON");
    return text == nullptr || std::string_view(text) != "0";
  }();
  return does;
}

/// Blocks are never returned to the driver, so a device keeps its maximum usage.
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
    collect();
    const std::size_t capacity = std::bit_ceil(std::max(num_bytes, kMinBlockBytes));
    std::vector<Block*>& reusable = free_[capacity];
    Block* block = nullptr;
    if (!reusable.empty()) {
      block = reusable.back();
      reusable.pop_back();
      block->owner = owner;
    } else {
      block = make(capacity, owner);
    }
    block->num_bytes = num_bytes;
    block->is_captured = is_capturing(owner);
    allocated_bytes_ += num_bytes;
    return block;
  }

  void give_back(Block* block) {
    const cuda::RelaxedCapture relaxed;
    const std::lock_guard lock(mutex_);
    allocated_bytes_ -= block->num_bytes;
    block->users.push_back(block->owner);
    if (block->is_captured || std::ranges::any_of(block->users, is_capturing)) return;
    if (std::ranges::all_of(block->users, is_idle)) {
      if (poisons()) std::memset(pointer_to(block->address), kPoison, block->capacity);
      free_[block->capacity].push_back(block);
    } else {
      release_in_order(block);
    }
    block->users.clear();
  }

  void add_user(Block* block, c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(block->users, stream) == block->users.end())
      block->users.push_back(stream);
  }

  std::size_t allocated_bytes() {
    const std::lock_guard lock(mutex_);
    return allocated_bytes_;
  }

 private:
  static Block* make(std::size_t capacity, c10::Stream owner) {
    const ContextGuard context(owner.device_index());
    auto* block = new Block{.capacity = capacity, .owner = owner};
    check(driver().mem_alloc(&block->address, capacity), "allocate memory for a tensor");
    if (poisons()) std::memset(pointer_to(block->address), kPoison, capacity);
    return block;
  }

  /// On its own stream, so that no other stream waits.
  void release_in_order(Block* block) {
    const c10::Stream reclaim = reclaim_stream(block->owner.device_index());
    for (const c10::Stream stream : block->users) wait_for_stream(reclaim, stream);
    if (poisons()) fill_bytes(pointer_to(block->address), kPoison, block->capacity, reclaim);
    block->released_by.emplace(kEmulatedGpu).record(reclaim);
    pending_.push_back(block);
  }

  void collect() {
    std::erase_if(pending_, [this](Block* block) {
      if (!block->released_by->query()) return false;
      block->released_by.reset();
      free_[block->capacity].push_back(block);
      return true;
    });
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<Block*>> free_;  // by capacity
  std::vector<Block*> pending_;
  std::size_t allocated_bytes_ = 0;
};

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Heap::of(block->owner.device_index()).give_back(block);
}

class EmulatedGpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    const c10::DeviceIndex device = current_device();
    const c10::Device owner(kEmulatedGpu, device);
    if (num_bytes == 0) return {nullptr, nullptr, &delete_nothing, owner};
    Block* block = Heap::of(device).take(num_bytes, current_stream(device));
    return {pointer_to(block->address), block, &delete_block, owner};
  }

  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    copy_bytes(to, from, num_bytes, current_stream(current_device()));
  }

 private:
  static void delete_nothing(void*) {}
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
  check(
      driver().memcpy_async(reinterpret_cast<cuda::DevicePtr>(to),
                            reinterpret_cast<cuda::DevicePtr>(from), num_bytes, handle_of(stream)),
      "copy a tensor");
}

void fill_bytes(void* to, unsigned char value, std::size_t num_bytes, c10::Stream stream) {
  if (num_bytes == 0) return;
  const ContextGuard context(stream.device_index());
  check(driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(to), value, num_bytes,
                                 handle_of(stream)),
        "fill a tensor");
}

std::size_t allocated_bytes(c10::DeviceIndex device) { return Heap::of(device).allocated_bytes(); }

}  // namespace ringcomm::emulator
