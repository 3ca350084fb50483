#include "emulator/torch/pinned_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "emulator/torch/extra_driver.h"
#include "emulator/torch/streams.h"

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kMinBlockBytes = 512;

class PinnedHeap {
 public:
  static PinnedHeap& of_process() {
    static auto& one = *new PinnedHeap();
    return one;
  }

  void* take(std::size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    const std::size_t capacity = std::bit_ceil(std::max(num_bytes, kMinBlockBytes));
    std::vector<void*>& reusable = free_[capacity];
    if (!reusable.empty()) {
      void* address = reusable.back();
      reusable.pop_back();
      return address;
    }
    const RelaxedCapture relaxed;
    const cuda::ContextGuard context(current_device());
    void* address = nullptr;
    cuda::check(cuda::driver().mem_host_alloc(&address, capacity, cuda::kHostPortable),
                "allocate pinned memory");
    capacities_[static_cast<char*>(address)] = capacity;
    return address;
  }

  void give_back(void* address) {
    const std::lock_guard lock(mutex_);
    free_[capacities_.at(static_cast<char*>(address))].push_back(address);
  }

  bool has(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto* wanted = static_cast<const char*>(address);
    auto after = capacities_.upper_bound(const_cast<char*>(wanted));
    if (after == capacities_.begin()) return false;
    --after;
    return wanted < after->first + after->second;
  }

 private:
  std::mutex mutex_;
  std::map<char*, std::size_t> capacities_;
  std::map<std::size_t, std::vector<void*>> free_;  // by capacity
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t num_bytes) override {
    void* address = PinnedHeap::of_process().take(num_bytes);
    return {address, address, &delete_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_pinned; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }

 private:
  static void delete_pinned(void* address) { PinnedHeap::of_process().give_back(address); }
};

}  // namespace

c10::Allocator& pinned_allocator() {
  static auto& one = *new PinnedAllocator();
  return one;
}

bool is_pinned(const void* address) { return PinnedHeap::of_process().has(address); }

}  // namespace ringcomm::emulator
