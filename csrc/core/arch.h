#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace ringcomm {

/// Why a wait ended before its condition held. Device code cannot throw: the layer that knows the
/// ranks' names makes an error of it.
enum class [[nodiscard]] WaitStatus : std::uint8_t {
  kNone = 0,     ///< the condition holds
  kTimeout,      ///< the deadline of the operation passed
  kPeerDied,     ///< the process of the rank waited for has ended, or of one it needs
  kPeerLeft,     ///< the rank waited for has destroyed its side of the group
  kAborted,      ///< another rank failed and reported why
  kInterrupted,  ///< this process was asked to stop waiting (a signal, an abort call)
};

/// Bytes between two words that different ranks write: a pair of cache lines, since the
/// adjacent-line prefetcher of x86 cores pulls lines in twos.
inline constexpr std::size_t kLineBytes = 128;

/// A count that one rank advances and others wait for; monotonic, so that "at least" is the only
/// comparison. Plain words: every access goes through an Arch, which defines its memory order.
struct Cursor {
  alignas(kLineBytes) std::uint64_t value = 0;
  /// What the writer publishes together with the value reaches the readers in the same cache line.
  std::byte payload[kLineBytes - sizeof(std::uint64_t)] = {};
  /// Ranks about to sleep on `value`; in the writer's cache while none is.
  alignas(kLineBytes) std::uint32_t sleepers = 0;
  std::uint32_t waker_core = 0;  ///< the processor of the rank that last woke them
};
static_assert(sizeof(Cursor) == 2 * kLineBytes);

/// What happened during a yield: no other thread ran, one ran briefly, or one ran for a full
/// scheduler slice.
enum class Yielded : std::uint8_t { kCoreIdle, kShort, kLong };

/// What a machine must offer for the protocols of core to run on it (docs/design/protocol.md).
/// Every memory order belongs to an operation; there are no separate fences, because
/// ThreadSanitizer ignores them.
///
/// - load_acquire pairs with store_seq_cst of the same word.
/// - load_seq_cst, store_seq_cst and add_seq_cst have one total order: a store followed by a load
///   of another word (cursor, then sleepers; or sleepers, then cursor) is not reordered.
/// - copy moves what goes through a link and has no order of its own. Who fills a region of a board
///   copies by itself.
/// - budget is the SpinBudget of the waits, a reference or a new one.
/// - once runs a function that returns a WaitStatus: if several threads act for one rank (those of
///   a GPU block), one of them runs it, and all return its result.
/// - each runs a function for every number below the one given, in parallel if several threads act
///   for the rank, and returns kNone, or another WaitStatus, to all of them.
/// - pause is one step of waiting; yield offers the processor and returns what happened.
/// - park sleeps while the low half of the word equals that of `expected`, for one slice at most;
///   wake wakes all that are parked on the word.
/// - record_core stores this rank's processor; leave_core moves this thread away from that one.
/// - stopped returns why this rank should no longer wait for `peer`, or WaitStatus::kNone: before
///   every slice of sleep, and before a wait ends without its condition.
/// - record_wait may be missing, and look_until, which is the wait of a machine that never sleeps
///   (see wait_policy.h).
template <class A>
concept Arch = requires(A arch, std::uint64_t& word, std::uint32_t& count, std::uint64_t value,
                        void* to, const void* from, std::size_t num_bytes, int peer,
                        WaitStatus (*function)(), WaitStatus (*each_function)(int)) {
  { arch.load_acquire(word) } -> std::same_as<std::uint64_t>;
  { arch.load_seq_cst(word) } -> std::same_as<std::uint64_t>;
  { arch.load_seq_cst(count) } -> std::same_as<std::uint32_t>;
  arch.store_seq_cst(word, value);
  arch.add_seq_cst(count, std::int32_t{1});
  arch.copy(to, from, num_bytes);
  arch.budget();
  { arch.once(function) } -> std::same_as<WaitStatus>;
  { arch.each(peer, each_function) } -> std::same_as<WaitStatus>;
  arch.pause();
  { arch.yield() } -> std::same_as<Yielded>;
  arch.park(word, value);
  arch.wake(word);
  arch.record_core(count);
  arch.leave_core(count);
  { arch.stopped(peer) } -> std::same_as<WaitStatus>;
};

}  // namespace ringcomm
