#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

#include "host/process.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/// The clock of what is recorded: the cycle counter, or CLOCK_MONOTONIC where the counter does not
/// have one rate on all cores, also while they sleep, or the counters of two sockets may differ.
namespace ringcomm {

inline const bool has_cycle_counter = [] {
#if defined(__x86_64__)
  // The bit says that the rate is constant, and nothing about other sockets.
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) != 0 &&
         kernel_uses_cycle_counter(
             "/sys/devices/system/clocksource/clocksource0/current_clocksource");
#else
  return false;
#endif
}();

inline std::uint64_t monotonic_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

inline std::uint64_t ticks() {
#if defined(__x86_64__)
  if (has_cycle_counter) [[likely]]
    return __builtin_ia32_rdtsc();
#endif
  return monotonic_ns();
}

/// One moment by both clocks.
struct Anchor {
  std::uint64_t ticks, ns;

  /// A thread may lose its core between two readings: the closest of a few.
  static Anchor now() {
    Anchor best{};
    auto least = std::numeric_limits<std::uint64_t>::max();
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t before = ringcomm::ticks();
      const std::uint64_t ns = monotonic_ns();
      const std::uint64_t passed = ringcomm::ticks() - before;
      if (passed < least) best = {before + passed / 2, ns};
      least = passed < least ? passed : least;
    }
    return best;
  }
};

/// The rate of ticks, once this process has a recorder.
inline std::atomic<double> ns_per_tick = 1;

/// `passed` ticks in ns; negative where the counters of two sockets differ.
inline double ns_of(std::uint64_t passed) {
  return static_cast<double>(static_cast<std::int64_t>(passed)) *
         ns_per_tick.load(std::memory_order_relaxed);
}

inline constexpr double kLongWait_ns = 100'000;
/// `passed` ticks in ns if they are a long wait, else 0.
inline std::uint64_t long_wait_ns(std::uint64_t passed) {
  const double waited_ns = ns_of(passed);
  return waited_ns >= kLongWait_ns ? static_cast<std::uint64_t>(waited_ns) : 0;
}

}  // namespace ringcomm
