// What torch asks of an accelerator beside operators and memory: pinned host memory, autocast.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <iterator>
#include <map>
#include <mutex>

#include "emulator/torch/device.h"

namespace ringcomm::emulator {
namespace {

struct Pinned {
  std::mutex mutex;
  std::map<const std::byte*, std::size_t> blocks;  // their bytes

  static Pinned& instance() {
    static auto& pinned = *new Pinned();
    return pinned;
  }
};

void unpin(void* block) {
  Pinned& pinned = Pinned::instance();
  {
    const std::lock_guard lock(pinned.mutex);
    pinned.blocks.erase(static_cast<const std::byte*>(block));
  }
  at::getCPUAllocator()->raw_deallocate(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, c10::kCPU};
    void* const block = at::getCPUAllocator()->raw_allocate(num_bytes);
    Pinned& pinned = Pinned::instance();
    const std::lock_guard lock(pinned.mutex);
    pinned.blocks[static_cast<const std::byte*>(block)] = num_bytes;
    return {block, block, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

}  // namespace

c10::Allocator& pinned_allocator() {
  static PinnedAllocator allocator;
  return allocator;
}

bool is_pinned(const void* data) {
  Pinned& pinned = Pinned::instance();
  const auto* const byte = static_cast<const std::byte*>(data);
  const std::lock_guard lock(pinned.mutex);
  const auto next = pinned.blocks.upper_bound(byte);
  if (next == pinned.blocks.begin()) return false;
  const auto& [begin, num_bytes] = *std::prev(next);
  return byte < begin + num_bytes;
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
}

}  // namespace ringcomm::emulator
