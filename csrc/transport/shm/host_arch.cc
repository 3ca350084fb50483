#include "transport/shm/host_arch.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

namespace ringcomm::shm {
namespace {

// How late a time-out, a death or an abort may be noticed. Halving it doubles the wake-ups of an
// idle rank (50 a second now); doubling it brings nothing measurable.
constexpr long kParkSliceNs = 20'000'000;

// A yield that nobody takes is a system call of 0.2-0.5 us; one that a waiting rank takes, 2-5.
constexpr std::chrono::microseconds kIdleYield{1};
// Ranks that wait give the processor back within microseconds; who keeps it for this long computes.
constexpr std::chrono::microseconds kDearYield{500};

// A futex is 32 bits wide and its comparison is for equality: the half of the cursor that changes
// with every step.
std::uint32_t* low_half(std::uint64_t& word) {
  auto* halves = reinterpret_cast<std::uint32_t*>(&word);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
}

}  // namespace

Yielded HostArch::yield() const {
  const auto begin = std::chrono::steady_clock::now();
  ::sched_yield();
  const auto away = std::chrono::steady_clock::now() - begin;
  if (away > kDearYield) return Yielded::kDearly;
  return away > kIdleYield ? Yielded::kBriefly : Yielded::kToNobody;
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

void HostArch::note_core(std::uint32_t& core) const {
  __atomic_store_n(&core, static_cast<std::uint32_t>(::sched_getcpu()), __ATOMIC_RELAXED);
}

// Linux may place who is woken beside its waker, which goes on running, though another core is idle
// (virtual machines report idle cores as taken away), and leaves the two there for seconds: a round
// trip then takes 20 us instead of 8, and what they compute twice as long. To be pinned to the next
// core by number, which mostly has the same caches and memory, and unpinned moves the thread now.
void HostArch::leave_core(const std::uint32_t& core) const {
  const int here = ::sched_getcpu();
  if (here < 0 || static_cast<std::uint32_t>(here) != __atomic_load_n(&core, __ATOMIC_RELAXED))
    return;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  if (CPU_COUNT(&allowed) < std::max(num_ranks_, 2)) return;
  int next = here;
  do next = (next + 1) % CPU_SETSIZE;
  while (!CPU_ISSET(next, &allowed));
  cpu_set_t only_next;
  CPU_ZERO(&only_next);
  CPU_SET(next, &only_next);
  if (::sched_setaffinity(0, sizeof(only_next), &only_next) == 0)
    ::sched_setaffinity(0, sizeof(allowed), &allowed);
}

}  // namespace ringcomm::shm
