#pragma once

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <vector>

namespace ringcomm::checker {

/// Ranks as fibers whose complete execution state can be copied out and put back.
///
/// A fiber is the live part of its stack and its saved registers. Both are copied to and from the
/// same addresses, so pointers between frames stay right, and a search returns to a state it
/// branched at without running the program again. What fibers may not do follows from that:
/// allocate, throw, or change anything outside their stack that is not part of the machine's own
/// state.
class FiberSet {
 public:
  static constexpr int kMaxFibers = 4;
  using Body = void (*)(int fiber_idx);

  /// Prepares `num_fibers` fibers; none has run yet. `body` must end in suspend(), never return.
  void reset(int num_fibers, Body body);

  /// Scheduler side: runs the fiber until it suspends.
  void resume(int fiber_idx);
  /// Fiber side: gives control back to the scheduler.
  void suspend(int fiber_idx);

  void save(std::vector<std::byte>& out) const;
  /// Restores what save() wrote from `from` on.
  void restore(const std::byte* from);

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;
  /// Below the frame of suspend(): its spills and the return address that swapcontext() keeps.
  static constexpr std::size_t kMarginBytes = 512;

  struct Fiber {
    ucontext_t context;
    std::byte* live_begin = nullptr;
    alignas(64) std::array<std::byte, kStackBytes> stack;
  };

  ucontext_t scheduler_;
  int num_fibers_ = 0;
  std::array<Fiber, kMaxFibers> fibers_;
};

}  // namespace ringcomm::checker
