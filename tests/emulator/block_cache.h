#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace ringcomm::emulator {

/// Makes the plain accesses of a block take effect as late as a GPU allows: a store reaches memory
/// when a thread of the block releases or the block ends, and loaded data is not loaded again
/// before a thread of the block acquires. Threads of a block see each other's stores at once.
class BlockCache {
 public:
  virtual ~BlockCache() = default;

  void load(void* to, const void* from, std::size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    const auto* bytes = static_cast<const std::byte*>(from);
    for (std::size_t i = 0; i < num_bytes; ++i) {
      const auto stored = stored_.find(bytes + i);
      static_cast<std::byte*>(to)[i] = stored != stored_.end()
                                           ? stored->second
                                           : loaded_.try_emplace(bytes + i, bytes[i]).first->second;
    }
  }
  void store(void* to, const void* from, std::size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < num_bytes; ++i)
      stored_[static_cast<std::byte*>(to) + i] = static_cast<const std::byte*>(from)[i];
  }
  void acquire() {
    const std::lock_guard lock(mutex_);
    loaded_.clear();
  }
  /// When a thread of the block releases, and when the block ends.
  virtual void write_back() {
    const std::lock_guard lock(mutex_);
    for (const auto& [address, byte] : stored_) {
      loaded_.erase(address);
      *const_cast<std::byte*>(address) = byte;
    }
    stored_.clear();
  }

  /// The cache of this thread's block; null if plain accesses take effect at once.
  static inline thread_local BlockCache* current = nullptr;

 private:
  using Bytes = std::unordered_map<const std::byte*, std::byte>;

  std::mutex mutex_;
  Bytes stored_;
  Bytes loaded_;
};

template <class P>
P load_plain(const void* from) {
  if (BlockCache::current == nullptr) return *static_cast<const P*>(from);
  P value;
  BlockCache::current->load(&value, from, sizeof value);
  return value;
}
template <class P>
void store_plain(void* to, const P& value) {
  if (BlockCache::current == nullptr)
    *static_cast<P*>(to) = value;
  else
    BlockCache::current->store(to, &value, sizeof value);
}

}  // namespace ringcomm::emulator

// Plain accesses of kernels, in cuda/kernels/memory.h.
#define RINGCOMM_HOST_LOAD(P, from) ::ringcomm::emulator::load_plain<P>(from)
#define RINGCOMM_HOST_STORE(P, to, value) ::ringcomm::emulator::store_plain<P>(to, value)
