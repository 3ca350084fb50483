#include "emulator/block_cache.h"

namespace ringcomm::emulator {
namespace {

/// The byte of a line, or null where it is not known.
template <class Lines>
std::byte* find(Lines& lines, std::uintptr_t line, std::size_t idx) {
  const auto found = lines.find(line);
  return found != lines.end() && found->second.is_known[idx] ? &found->second.bytes[idx] : nullptr;
}

}  // namespace

void BlockCache::load(void* to, const void* from, std::size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(from) + i;
    const std::uintptr_t line = address / kLineBytes;
    const std::size_t idx = address % kLineBytes;
    const std::byte* byte = find(stored_, line, idx);
    if (byte == nullptr) byte = find(loaded_, line, idx);
    if (byte == nullptr) {
      Line& loaded = loaded_[line];
      loaded.bytes[idx] = static_cast<const std::byte*>(from)[i];
      loaded.is_known.set(idx);
      byte = &loaded.bytes[idx];
    }
    static_cast<std::byte*>(to)[i] = *byte;
  }
}

void BlockCache::store(void* to, const void* from, std::size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(to) + i;
    Line& line = stored_[address / kLineBytes];
    line.bytes[address % kLineBytes] = static_cast<const std::byte*>(from)[i];
    line.is_known.set(address % kLineBytes);
  }
}

void BlockCache::write_back() {
  const std::lock_guard lock(mutex_);
  for (const auto& [idx, line] : stored_) {
    loaded_.erase(idx);
    auto* const bytes = reinterpret_cast<std::byte*>(idx * kLineBytes);
    for (std::size_t i = 0; i < kLineBytes; ++i)
      if (line.is_known[i]) bytes[i] = line.bytes[i];
  }
  stored_.clear();
}

void BlockCache::acquire() {
  const std::lock_guard lock(mutex_);
  loaded_.clear();
}

}  // namespace ringcomm::emulator
