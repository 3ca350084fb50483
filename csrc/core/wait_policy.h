#pragma once

#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"

namespace ringcomm {

/// How long to spin before yielding the processor. It grows on a hit and halves on a miss: within 2
/// to 3 times of the best fixed spin, whether or not every rank has its own core
/// (docs/decisions.md). As long as no other thread takes the processor, a miss is no
/// reason to spin less: the budget grows to the skew of the ranks, so that a decoding loop never
/// sleeps.
class SpinBudget {
 public:
  static constexpr std::uint32_t kMinPauses = 20;
  static constexpr std::uint32_t kMaxPauses = 20'000;  // about 0.5 ms at 24 ns a pause
  /// What an idle core may always spin: twice a futex round trip and more.
  static constexpr std::uint32_t kIdlePauses = 4'000;
  /// Of many ranks on a core each may be late: with 10 yields some waits end in a sleep.
  static constexpr std::uint32_t kMaxYields = 40;
  /// If every rank has its own core, yields that return at once have a separate limit. Without it,
  /// a rank with a small spin budget would pay a futex round trip (22 us) for every 5 us wait.
  static constexpr std::uint32_t kMaxIdleYields = 200;
  /// Next to a busy process of another program, a yield loses a whole scheduler slice (3-4 ms).
  /// After such a yield some waits go directly from spinning to sleeping: so few after the first,
  /// because what took the core may be over, and twice as many after each further one,
  static constexpr std::uint32_t kFewestWithoutYield = 4;
  static constexpr std::uint32_t kMostWithoutYield = 256;
  /// but half as many whenever this many waits have yielded and lost nothing.
  static constexpr std::uint32_t kYieldsForgiven = 32;

  constexpr SpinBudget() = default;
  /// A budget that does not spin at all, for machines that explore every interleaving.
  static constexpr SpinBudget none() {
    SpinBudget budget;
    budget.num_pauses_ = 0;
    budget.is_fixed_ = true;
    return budget;
  }

  RINGCOMM_HD constexpr std::uint32_t num_pauses() const { return num_pauses_; }

  /// The condition came true while spinning.
  RINGCOMM_HD constexpr void hit() {
    if (is_fixed_) return;
    num_pauses_ += num_pauses_ / 8 + 1;
    if (num_pauses_ > kMaxPauses) num_pauses_ = kMaxPauses;
  }
  /// Spinning failed. Returns how many yields to try next.
  RINGCOMM_HD constexpr std::uint32_t take_yields() {
    if (is_fixed_) return 0;
    if (num_without_yield_ > 0) {
      --num_without_yield_;
      return 0;
    }
    if (penalty_ > 0 && ++num_yielded_ == kYieldsForgiven) {
      num_yielded_ = 0;
      penalty_ /= 2;
    }
    return kMaxYields;
  }
  /// After the yields: whether all found the core idle, and whether the condition came true.
  RINGCOMM_HD constexpr void miss(bool is_idle, bool has_come) {
    if (is_idle && (has_come || num_pauses_ < kIdlePauses)) return hit();
    if (is_fixed_) return;
    num_pauses_ /= 2;
    if (num_pauses_ < kMinPauses) num_pauses_ = kMinPauses;
  }
  /// Another thread kept the processor for a full scheduler slice during a yield.
  RINGCOMM_HD constexpr void yield_was_long() {
    penalty_ *= 2;
    if (penalty_ < kFewestWithoutYield) penalty_ = kFewestWithoutYield;
    if (penalty_ > kMostWithoutYield) penalty_ = kMostWithoutYield;
    num_without_yield_ = penalty_;
    num_yielded_ = 0;
  }

 private:
  std::uint32_t num_pauses_ = 2'000;
  std::uint32_t penalty_ = 0;            // waits without a yield after the last long one
  std::uint32_t num_without_yield_ = 0;  // of these still to come
  std::uint32_t num_yielded_ = 0;        // waits since then that lost nothing
  bool is_fixed_ = false;
};

/// On a machine that records waits, records that this rank waits for `peer`. Keep the result until
/// the wait ends.
template <Arch A>
RINGCOMM_HD auto record_wait(A& arch, int peer) {
  if constexpr (requires { arch.record_wait(peer); })
    return arch.record_wait(peer);
  else
    return 0;
}

/// A wait of threads that sleep, after a first look.
template <Arch A>
RINGCOMM_HD WaitStatus spin_and_sleep(A& arch, SpinBudget& budget, Cursor& cursor,
                                      std::uint64_t target, int peer) {
  [[maybe_unused]] const auto recorded = record_wait(arch, peer);
  RINGCOMM_ROLLED
  for (std::uint32_t i = 0; i < budget.num_pauses(); ++i) {
    arch.pause();
    if (arch.load_acquire(cursor.value) >= target) {
      budget.hit();
      return WaitStatus::kNone;
    }
  }
  const std::uint32_t max_yields = budget.take_yields();
  bool is_idle = true;
  RINGCOMM_ROLLED
  for (std::uint32_t num_taken = 0, num_idle = 0;
       num_taken < max_yields && num_idle < SpinBudget::kMaxIdleYields;) {
    const Yielded yielded = arch.yield();
    is_idle = is_idle && yielded == Yielded::kCoreIdle;
    if (yielded == Yielded::kLong) budget.yield_was_long();
    if (arch.load_acquire(cursor.value) >= target) {
      budget.miss(is_idle, true);
      return WaitStatus::kNone;
    }
    if (yielded == Yielded::kLong) break;
    ++(yielded == Yielded::kCoreIdle ? num_idle : num_taken);
  }
  budget.miss(is_idle && max_yields > 0, false);
  for (;;) {
    const WaitStatus stop = arch.stopped(peer);
    // A peer may publish and then die or leave. So the cursor is read after the reason to stop, and
    // decides.
    if (arch.load_acquire(cursor.value) >= target) return WaitStatus::kNone;
    if (stop != WaitStatus::kNone) return stop;
    // Store (sleepers) then load (value) here, store (value) then load (sleepers) in advance():
    // sequential consistency lets at most one of the two loads miss the other's store, so no
    // wake-up is lost.
    arch.add_seq_cst(cursor.sleepers, 1);
    const std::uint64_t seen = arch.load_seq_cst(cursor.value);
    if (seen < target) arch.park(cursor.value, seen);
    arch.add_seq_cst(cursor.sleepers, -1);
    if (seen < target && arch.load_acquire(cursor.value) > seen) arch.leave_core(cursor.waker_core);
  }
}

/// wait_at_least() of one thread.
template <Arch A>
RINGCOMM_HD WaitStatus wait_in_one_thread(A& arch, SpinBudget& budget, Cursor& cursor,
                                          std::uint64_t target, int peer) {
  if (arch.load_acquire(cursor.value) >= target) return WaitStatus::kNone;
  if constexpr (requires { arch.look_until(cursor, target, peer); })
    return arch.look_until(cursor, target, peer);
  else
    return spin_and_sleep(arch, budget, cursor, target, peer);
}

/// Waits until `cursor.value` is at least `target`: spins, yields a few times, then parks in
/// slices, where threads sleep; checks for a reason to stop before every slice. `peer` is the rank
/// that advances the cursor.
template <Arch A>
RINGCOMM_HD WaitStatus wait_at_least(A& arch, SpinBudget& budget, Cursor& cursor,
                                     std::uint64_t target, int peer) {
  return arch.once([&] { return wait_in_one_thread(arch, budget, cursor, target, peer); });
}

/// The same with the machine's own budget. Boards and links hold no reference to it: the compiler
/// cannot split an object into registers while its address is stored, and a GPU kernel would then
/// keep its state in local memory.
template <Arch A>
RINGCOMM_HD WaitStatus wait_at_least(A& arch, Cursor& cursor, std::uint64_t target, int peer) {
  auto&& budget = arch.budget();
  return wait_at_least(arch, budget, cursor, target, peer);
}

/// Waits until the cursors of all peers of `rank` are at least `target`: in parallel if several
/// threads act for the rank, so that many peers take no longer than one. Each rank starts with the
/// next one, so that no line is asked for by all ranks at once.
template <Arch A, class CursorOf>
RINGCOMM_HD WaitStatus wait_all_at_least(A& arch, int world_size, int rank,
                                         const CursorOf& cursor_of, std::uint64_t target) {
  return arch.each(world_size - 1, [&](int idx) {
    const int next = rank + 1 + idx;
    const int peer = next < world_size ? next : next - world_size;
    auto&& budget = arch.budget();
    return wait_in_one_thread(arch, budget, cursor_of(peer), target, peer);
  });
}

/// Wakes the ranks that sleep on `cursor` after its value has changed.
template <Arch A>
RINGCOMM_HD void wake_sleepers(A& arch, Cursor& cursor) {
  if (arch.load_seq_cst(cursor.sleepers) == 0) return;
  arch.record_core(cursor.waker_core);
  arch.wake(cursor.value);
}

/// Publishes `value` in `cursor` and wakes the ranks that sleep on it. All earlier writes of this
/// rank are visible to a rank whose wait_at_least() saw the value.
template <Arch A>
RINGCOMM_HD void advance(A& arch, Cursor& cursor, std::uint64_t value) {
  arch.store_seq_cst(cursor.value, value);
  wake_sleepers(arch, cursor);
}

/// The same in each reader's own cursor. Each store has the guarantees of advance(), so the stores
/// need no order among themselves.
template <class A, class CursorOf>
RINGCOMM_HD void advance_each(A& arch, int num_readers, const CursorOf& cursor_of,
                              std::uint64_t value) {
  arch.store_seq_cst_each(
      num_readers, [&](int reader) -> std::uint64_t& { return cursor_of(reader).value; }, value);
  for (int reader = 0; reader < num_readers; ++reader) wake_sleepers(arch, cursor_of(reader));
}

}  // namespace ringcomm
