#pragma once

#include <algorithm>
#include <cstdint>

#include "core/annotations.h"
#include "core/arch.h"
#include "core/cursor.h"

namespace ringcomm {

/// How long to spin before giving the processor away; adapts to whether spinning pays.
///
/// Measured on two cores (docs/experiments.md, "waiting"): a fixed long spin is best while every
/// rank has a core of its own and 100 times too slow when it has not; a fixed short one costs a
/// futex round trip (22 us) for every wait of more than 5 us. Growing on a hit and halving on a
/// miss stays within 2-3 times of the best in both cases and needs no count of cores, which
/// containers misreport.
class SpinBudget {
 public:
  static constexpr std::uint32_t kMinPauses = 20;
  static constexpr std::uint32_t kMaxPauses = 20'000;  // about 0.5 ms at 24 ns a pause
  static constexpr std::uint32_t kMaxYields = 10;
  /// Yields that nobody takes, where there are cores enough for all ranks, count apart: they keep a
  /// rank whose budget has shrunk from a futex round trip for every wait of 5 us.
  static constexpr std::uint32_t kMaxIdleYields = 200;
  /// A yield beside a busy stranger gives away a whole scheduler slice (3-4 ms). After one such,
  /// this many waits go from spinning to sleeping at once: with 4 ranks and a stranger on two cores
  /// a barrier takes 1,600 us on average when every wait may yield, and 20-30 with this.
  static constexpr std::uint32_t kWaitsWithoutYield = 256;

  constexpr SpinBudget() = default;
  /// A budget that does not spin at all, for machines that explore every interleaving.
  static constexpr SpinBudget none() {
    SpinBudget budget;
    budget.num_pauses_ = 0;
    budget.is_fixed_ = true;
    return budget;
  }

  constexpr std::uint32_t num_pauses() const { return num_pauses_; }

  /// The condition came true while spinning.
  constexpr void hit() {
    if (!is_fixed_) num_pauses_ = std::min(num_pauses_ + num_pauses_ / 8 + 1, kMaxPauses);
  }
  /// Spinning was in vain. Returns how many yields to try next.
  constexpr std::uint32_t miss() {
    if (is_fixed_) return 0;
    num_pauses_ = std::max(num_pauses_ / 2, kMinPauses);
    if (num_waits_without_yield_ == 0) return kMaxYields;
    --num_waits_without_yield_;
    return 0;
  }
  /// A yield gave the processor to somebody who kept it.
  constexpr void yield_was_dear() { num_waits_without_yield_ = kWaitsWithoutYield; }

 private:
  std::uint32_t num_pauses_ = 2'000;
  std::uint32_t num_waits_without_yield_ = 0;
  bool is_fixed_ = false;
};

/// Notes, on a machine that records what its ranks wait for, that this one waits for `peer`. The
/// result lives as long as the wait.
template <Arch A>
RINGCOMM_HD auto record_wait(A& arch, int peer) {
  if constexpr (requires { arch.record_wait(peer); })
    return arch.record_wait(peer);
  else
    return 0;
}

/// wait_at_least() of one thread.
template <Arch A>
RINGCOMM_HD Stop wait_in_one_thread(A& arch, SpinBudget& budget, Cursor& cursor,
                                    std::uint64_t target, int peer) {
  if (arch.load_acquire(cursor.value) >= target) return Stop::kNone;
  [[maybe_unused]] const auto recorded = record_wait(arch, peer);
  RINGCOMM_ROLLED
  for (std::uint32_t i = 0; i < budget.num_pauses(); ++i) {
    arch.pause();
    if (arch.load_acquire(cursor.value) >= target) {
      budget.hit();
      return Stop::kNone;
    }
  }
  const std::uint32_t max_yields = budget.miss();
  RINGCOMM_ROLLED
  for (std::uint32_t num_taken = 0, num_idle = 0;
       num_taken < max_yields && num_idle < SpinBudget::kMaxIdleYields;) {
    const Yielded yielded = arch.yield();
    if (yielded == Yielded::kDearly) budget.yield_was_dear();
    if (arch.load_acquire(cursor.value) >= target) return Stop::kNone;
    if (yielded == Yielded::kDearly) break;
    ++(yielded == Yielded::kToNobody ? num_idle : num_taken);
  }
  for (;;) {
    const Stop stop = arch.stopped(peer);
    // A peer that published and then died, or left, has still published: the cursor has the last
    // word, and it is read after the reason to stop.
    if (arch.load_acquire(cursor.value) >= target) return Stop::kNone;
    if (stop != Stop::kNone) return stop;
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

/// Waits until `cursor.value` is at least `target`: spins, yields a few times, then parks in
/// slices; looks for a reason to stop before every slice. `peer` is the rank that advances the
/// cursor.
template <Arch A>
RINGCOMM_HD Stop wait_at_least(A& arch, SpinBudget& budget, Cursor& cursor, std::uint64_t target,
                               int peer) {
  return arch.once([&] { return wait_in_one_thread(arch, budget, cursor, target, peer); });
}

/// The same with the machine's own budget. No board or link keeps a reference to it: an object that
/// holds the address of its neighbour is not split into registers, and a GPU's kernel then keeps
/// its whole state in local memory.
template <Arch A>
RINGCOMM_HD Stop wait_at_least(A& arch, Cursor& cursor, std::uint64_t target, int peer) {
  auto&& budget = arch.budget();
  return wait_at_least(arch, budget, cursor, target, peer);
}

/// Waits until the cursors of all peers of `rank` are at least `target`: of all at once where
/// several threads carry the rank, so that many peers take no longer than one.
template <Arch A, class CursorOf>
RINGCOMM_HD Stop wait_all_at_least(A& arch, int world_size, int rank, const CursorOf& cursor_of,
                                   std::uint64_t target) {
  return arch.each(world_size - 1, [&](int idx) {
    const int peer = idx < rank ? idx : idx + 1;
    auto&& budget = arch.budget();
    return wait_in_one_thread(arch, budget, cursor_of(peer), target, peer);
  });
}

/// Wakes whoever sleeps on `cursor`, whose value has changed.
template <Arch A>
RINGCOMM_HD void wake_sleepers(A& arch, Cursor& cursor) {
  if (arch.load_seq_cst(cursor.sleepers) == 0) return;
  arch.note_core(cursor.waker_core);
  arch.wake(cursor.value);
}

/// Publishes `value` in `cursor` and wakes whoever sleeps on it. All that this rank wrote before is
/// visible to a rank whose wait_at_least() saw the value.
template <Arch A>
RINGCOMM_HD void advance(A& arch, Cursor& cursor, std::uint64_t value) {
  arch.store_seq_cst(cursor.value, value);
  wake_sleepers(arch, cursor);
}

/// The same in each reader's own cursor. Every one of the stores says all that advance() says, so
/// the readers need no order between them.
template <class A, class CursorOf>
RINGCOMM_HD void advance_each(A& arch, int num_readers, const CursorOf& cursor_of,
                              std::uint64_t value) {
  arch.store_seq_cst_each(
      num_readers, [&](int reader) -> std::uint64_t& { return cursor_of(reader).value; }, value);
  for (int reader = 0; reader < num_readers; ++reader) wake_sleepers(arch, cursor_of(reader));
}

}  // namespace ringcomm
