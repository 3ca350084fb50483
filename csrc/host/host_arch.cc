#include "host/host_arch.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>
#include <vector>

#include "host/thread_pool.h"

namespace ringcomm::host {
namespace {

// How late a time-out, a death or an abort may be noticed: an idle rank wakes 50 times a second.
constexpr long kParkSliceNs = 20'000'000;

// A yield takes 0.2-0.5 us if no other thread runs, and 2-5 us if a waiting rank does.
constexpr std::chrono::microseconds kIdleYield{1};
// A waiting rank yields again within microseconds; a thread that runs for this long computes. Ranks
// that share a core run one after another, so more of them take longer; at most less than the 3 ms
// for which the scheduler lets a computing program run.
constexpr std::chrono::microseconds kLongYield{500};
constexpr std::chrono::microseconds kLongYieldPerRank{250};
constexpr std::chrono::microseconds kLongestYield{2000};

// A futex is 32 bits wide and its comparison is for equality: the half of the cursor that changes
// with every step.
std::uint32_t* low_half(std::uint64_t& word) {
  auto* halves = reinterpret_cast<std::uint32_t*>(&word);
  return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? halves : halves + 1;
}

// Restores the thread's cores. If it was not pinned, it gets all cores, so that a cpuset that grows
// later applies to it.
void unpin(const Cores& allowed) {
  if (!restrict_thread(Cores{}.set()) || cores_of_thread() != allowed) restrict_thread(allowed);
}

}  // namespace

// If ranks share cores, a yield that returns at once does not prove that the core is idle: the
// scheduler may not have found another thread eligible.
Yielded HostArch::yield() {
  start_clock();
  const int num_sharing = CoreShare::most_ranks_per_core();
  const auto begin = std::chrono::steady_clock::now();
  ::sched_yield();
  const auto away = std::chrono::steady_clock::now() - begin;
  if (away > std::clamp(num_sharing * kLongYieldPerRank, kLongYield, kLongestYield))
    return Yielded::kLong;
  return away <= kIdleYield && num_sharing == 1 ? Yielded::kCoreIdle : Yielded::kShort;
}

// FUTEX_WAIT and FUTEX_WAKE without the PRIVATE flag, because the word is in memory shared between
// processes. Results are ignored: the caller checks the word again in every case.

void HostArch::park(std::uint64_t& word, std::uint64_t expected) const {
  const timespec slice{.tv_sec = 0, .tv_nsec = kParkSliceNs};
  ::syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<std::uint32_t>(expected), &slice,
            nullptr, 0);
}

void HostArch::wake(std::uint64_t& word) const {
  ::syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void HostArch::record_core(std::uint32_t& core) const {
  // Stored plus one, so that 0 means none.
  __atomic_store_n(&core, static_cast<std::uint32_t>(::sched_getcpu()) + 1, __ATOMIC_RELAXED);
}

// Linux may place a woken thread on its waker's core although another core is idle (virtual
// machines report idle cores as busy), and leave both there for seconds. A round trip then takes 20
// us instead of 8, and computation takes twice as long. Pinning the thread to another core and
// unpinning it moves it immediately. Each rank chooses a different core, because several may wake
// at the same time.
void HostArch::leave_core(const std::uint32_t& core) const {
  const int here = ::sched_getcpu();
  if (here < 0 || static_cast<std::uint32_t>(here) + 1 != __atomic_load_n(&core, __ATOMIC_RELAXED))
    return;
  if (CoreShare::most_ranks_per_core() > 1) return;
  const Cores allowed = cores_of_thread();
  if (allowed.count() < 2) return;
  static const std::vector<Cores> nodes = read_nodes();
  auto next = static_cast<std::size_t>(here);
  const Cores cores = cores_of_node(allowed, next, nodes);  // the thread's memory is there
  for (std::size_t i = 0; i <= static_cast<std::size_t>(rank_) % (cores.count() - 1); ++i) {
    next = cores._Find_next(next);
    if (next == cores.size()) next = cores._Find_first();
  }
  if (restrict_thread(Cores{}.set(next))) unpin(allowed);
}

}  // namespace ringcomm::host
