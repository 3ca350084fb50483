#include "transport/shm/host_arch.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

namespace ringcomm::shm {
namespace {

// How late a time-out, a death or an abort may be noticed. Halving it doubles the wake-ups of an
// idle rank (50 a second now); doubling it brings nothing measurable.
constexpr long kParkSliceNs = 20'000'000;

// Ranks that wait give the processor back within microseconds; who keeps it for this long computes.
constexpr std::chrono::microseconds kDearYield{500};

// A futex is 32 bits wide and its comparison is for equality: the half of the cursor that changes
// with every step.
std::uint32_t* low_half(std::uint64_t& word) {
  auto* halves = reinterpret_cast<std::uint32_t*>(&word);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
}

}  // namespace

bool HostArch::yield() const {
  const auto begin = std::chrono::steady_clock::now();
  ::sched_yield();
  return std::chrono::steady_clock::now() - begin > kDearYield;
}

// FUTEX_WAIT and FUTEX_WAKE without the PRIVATE flag: the word lies in memory shared between
// processes. All results are ignored on purpose: woken, timed out, interrupted or changed already,
// the caller looks again.

void HostArch::park(std::uint64_t& word, std::uint64_t expected) const {
  const timespec slice{.tv_sec = 0, .tv_nsec = kParkSliceNs};
  ::syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<std::uint32_t>(expected), &slice,
            nullptr, 0);
}

void HostArch::wake(std::uint64_t& word) const {
  ::syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ringcomm::shm
