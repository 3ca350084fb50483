#include "fiber.h"

#include <cstring>

namespace ringcomm::checker {

void FiberSet::reset(int num_fibers, Body body) {
  num_fibers_ = num_fibers;
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers_[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(body), 1, i);
    fiber.live_begin = fiber.stack.data() + kStackBytes - kMarginBytes;
  }
}

void FiberSet::resume(int fiber_idx) { swapcontext(&scheduler_, &fibers_[fiber_idx].context); }

[[gnu::noinline]] void FiberSet::suspend(int fiber_idx) {
  Fiber& fiber = fibers_[fiber_idx];
  fiber.live_begin = static_cast<std::byte*>(__builtin_frame_address(0)) - kMarginBytes;
  swapcontext(&fiber.context, &scheduler_);
}

void FiberSet::save(std::vector<std::byte>& out) const {
  for (int i = 0; i < num_fibers_; ++i) {
    const Fiber& fiber = fibers_[i];
    const std::byte* live_end = fiber.stack.data() + kStackBytes;
    const auto live_bytes = static_cast<std::size_t>(live_end - fiber.live_begin);
    const std::size_t at = out.size();
    out.resize(at + sizeof(std::byte*) + sizeof(ucontext_t) + live_bytes);
    std::byte* to = out.data() + at;
    std::memcpy(to, &fiber.live_begin, sizeof(std::byte*));
    std::memcpy(to + sizeof(std::byte*), &fiber.context, sizeof(ucontext_t));
    std::memcpy(to + sizeof(std::byte*) + sizeof(ucontext_t), fiber.live_begin, live_bytes);
  }
}

void FiberSet::restore(const std::byte* from) {
  for (int i = 0; i < num_fibers_; ++i) {
    Fiber& fiber = fibers_[i];
    std::memcpy(&fiber.live_begin, from, sizeof(std::byte*));
    from += sizeof(std::byte*);
    std::memcpy(&fiber.context, from, sizeof(ucontext_t));
    from += sizeof(ucontext_t);
    const std::byte* live_end = fiber.stack.data() + kStackBytes;
    const auto live_bytes = static_cast<std::size_t>(live_end - fiber.live_begin);
    std::memcpy(fiber.live_begin, from, live_bytes);
    from += live_bytes;
  }
}

}  // namespace ringcomm::checker
