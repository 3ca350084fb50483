#pragma once

// The streaming copy, written once. The includer has defined, for its level,
//
//   stream_line(char* to, const char* from)   one cache line past the caches; `to` is aligned to it
//   stream_fence()                            orders the streamed lines before any later store

#include <cstddef>
#include <cstdint>

namespace ringcomm::host {
namespace {

constexpr std::size_t kStoreLineBytes = 64;

// Only whole lines are streamed: the processor gathers streamed bytes into a line, and sends a
// partial one to memory as several small writes. The partial lines at both ends go through the
// cache.
void stream_copy(void* to, const void* from, std::size_t num_bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const std::size_t to_boundary =
      (kStoreLineBytes - reinterpret_cast<std::uintptr_t>(out) % kStoreLineBytes) % kStoreLineBytes;
  const std::size_t head = to_boundary < num_bytes ? to_boundary : num_bytes;
  __builtin_memcpy(out, in, head);
  std::size_t offset = head;
  for (; num_bytes - offset >= kStoreLineBytes; offset += kStoreLineBytes)
    stream_line(out + offset, in + offset);
  __builtin_memcpy(out + offset, in + offset, num_bytes - offset);
  stream_fence();
}

}  // namespace
}  // namespace ringcomm::host
