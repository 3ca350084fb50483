#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "core/stop.h"

namespace ringcomm {

/// Who had the processor while a rank yielded: nobody, somebody for a moment, or somebody who kept
/// it for longer than ranks that wait do.
enum class Yielded : std::uint8_t { kToNobody, kBriefly, kDearly };

/// What a machine must offer for the protocols of core to run on it.
///
/// The link and board protocols are written once, against this concept, and run under several
/// machines: the host's processes over shared memory, threads in tests, and a model checker that
/// explores interleavings. Orders stand on the operations themselves, never on free-standing
/// fences, which ThreadSanitizer ignores.
///
/// - load_acquire pairs with store_seq_cst of the same word.
/// - load_seq_cst, store_seq_cst and add_seq_cst have one total order: a store followed by a load
/// of
///   another word (cursor, then sleepers; or sleepers, then cursor) is not reordered.
/// - copy moves payload and has no order of its own.
/// - budget is the SpinBudget of the waits (core/wait_policy.h), a reference or a new one.
/// - once runs a function that returns a Stop. Where several threads carry one rank, the threads of
///   a block on a GPU, one of them runs it, and all return, with what it returned, after it.
/// - each runs a function for every number below the one given, at once where several threads carry
///   the rank, and returns kNone or one of the other Stops to all of them, after all.
/// - pause is one step of waiting.
/// - yield gives the processor away, and tells what became of it.
/// - park sleeps while the low half of the word equals that of `expected`, for one slice at most.
/// - wake wakes all that are parked on the word.
/// - note_core writes down where this rank runs; leave_core asks to run elsewhere if it runs there.
/// - stopped says why this rank should no longer wait for `peer`; Stop::kNone while it should.
/// Asked
///   before every slice of sleep, and always before a wait ends without its condition.
/// - record_wait may be missing (see wait_policy.h).
template <class A>
concept Arch = requires(A arch, std::uint64_t& word, std::uint32_t& count, std::uint64_t value,
                        void* to, const void* from, std::size_t num_bytes, int peer,
                        Stop (*function)(), Stop (*each_function)(int)) {
  { arch.load_acquire(word) } -> std::same_as<std::uint64_t>;
  { arch.load_seq_cst(word) } -> std::same_as<std::uint64_t>;
  { arch.load_seq_cst(count) } -> std::same_as<std::uint32_t>;
  arch.store_seq_cst(word, value);
  arch.add_seq_cst(count, std::int32_t{1});
  arch.copy(to, from, num_bytes);
  arch.budget();
  { arch.once(function) } -> std::same_as<Stop>;
  { arch.each(peer, each_function) } -> std::same_as<Stop>;
  arch.pause();
  { arch.yield() } -> std::same_as<Yielded>;
  arch.park(word, value);
  arch.wake(word);
  arch.note_core(count);
  arch.leave_core(count);
  { arch.stopped(peer) } -> std::same_as<Stop>;
};

}  // namespace ringcomm
