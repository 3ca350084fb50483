#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cstdint>
#endif

namespace ringcomm::cpu {
namespace {

/// While it lives, this thread keeps denormal numbers: torch.set_flush_denormal() is a mode of one
/// thread, and ranks that add up the same values in different modes would get different bits.
class KeepDenormals {
 public:
  [[gnu::always_inline]] KeepDenormals() {
    if ((mode_ & kFlush) != 0) set(mode_ & ~kFlush);
  }
  [[gnu::always_inline]] ~KeepDenormals() {
    if ((mode_ & kFlush) != 0) set(mode_);
  }
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
  // The barriers keep loads, and so what is computed from them, between the two changes.
#if defined(__x86_64__)
  using Mode = unsigned;
  static constexpr Mode kFlush = 1U << 15 | 1U << 6;  // results, operands
  [[gnu::always_inline]] static Mode get() { return _mm_getcsr(); }
  [[gnu::always_inline]] static void set(Mode mode) {
    asm volatile("" ::: "memory");
    _mm_setcsr(mode);
    asm volatile("" ::: "memory");
  }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kFlush = 1U << 24 | 1U << 19;  // all types, 16-bit floats
  [[gnu::always_inline]] static Mode get() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  [[gnu::always_inline]] static void set(Mode mode) {
    asm volatile("msr fpcr, %0" ::"r"(mode) : "memory");
  }
#else
  using Mode = int;
  static constexpr Mode kFlush = 0;
  [[gnu::always_inline]] static Mode get() { return 0; }
  [[gnu::always_inline]] static void set(Mode) {}
#endif

  const Mode mode_ = get();
};

}  // namespace
}  // namespace ringcomm::cpu
