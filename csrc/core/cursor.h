#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

/// Bytes between two words that different ranks write: a pair of cache lines, since the
/// adjacent-line prefetcher of x86 cores pulls lines in twos.
inline constexpr std::size_t kLineBytes = 128;

/// A count that one rank advances and others wait for.
///
/// `value` is 64-bit, monotonic, never reset, and has one writer, so that "at least" is the only
/// comparison a reader needs. `sleepers` counts the ranks that are about to sleep on `value`; it
/// has its own cache line, so that the writer's check hits its cache while no rank sleeps.
/// `waker_core` is the processor of the rank that last woke them.
///
/// Plain words, not std::atomic: the struct is in memory shared with other processes and GPUs, and
/// every access goes through an Arch, which defines its memory order.
struct Cursor {
  alignas(kLineBytes) std::uint64_t value = 0;
  alignas(kLineBytes) std::uint32_t sleepers = 0;
  std::uint32_t waker_core = 0;
};
static_assert(sizeof(Cursor) == 2 * kLineBytes);

}  // namespace ringcomm
