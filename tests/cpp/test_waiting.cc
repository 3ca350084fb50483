// How a rank waits: its actions before it sleeps, and its processor afterwards.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/wait_policy.h"
#include "host/host_arch.h"
#include "host/process.h"
#include "host/wait.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;

// A machine whose yields have given outcomes, and on which a rank that sleeps finds the value there
// when it wakes.
struct ScriptedArch {
  Yielded outcome;
  Cursor& cursor;
  std::uint64_t value_on_waking;
  std::uint32_t num_yields = 0;
  std::uint32_t num_sleeps = 0;

  std::uint64_t load_acquire(const std::uint64_t& word) const { return word; }
  std::uint64_t load_seq_cst(const std::uint64_t& word) const { return word; }
  std::uint32_t load_seq_cst(const std::uint32_t& word) const { return word; }
  void store_seq_cst(std::uint64_t& word, std::uint64_t value) { word = value; }
  void add_seq_cst(std::uint32_t& word, std::int32_t delta) {
    word += static_cast<std::uint32_t>(delta);
  }
  void copy(void*, const void*, std::size_t) {}
  SpinBudget budget() { return {}; }
  template <class F>
  WaitStatus once(const F& function) {
    return function();
  }
  template <class F>
  WaitStatus each(int num, const F& function) {
    WaitStatus stop = WaitStatus::kNone;
    for (int i = 0; i < num && stop == WaitStatus::kNone; ++i) stop = function(i);
    return stop;
  }
  void pause() {}
  Yielded yield() {
    ++num_yields;
    return outcome;
  }
  void park(std::uint64_t&, std::uint64_t) {
    ++num_sleeps;
    cursor.value = value_on_waking;
  }
  void wake(std::uint64_t&) {}
  void record_core(std::uint32_t&) {}
  void leave_core(const std::uint32_t&) {}
  WaitStatus stopped(int) { return WaitStatus::kNone; }
};

std::uint32_t yields_before_sleep(SpinBudget& budget, Yielded outcome) {
  Cursor cursor;
  ScriptedArch arch{.outcome = outcome, .cursor = cursor, .value_on_waking = 1};
  CHECK(wait_at_least(arch, budget, cursor, 1, 0) == WaitStatus::kNone);
  CHECK(arch.num_sleeps == 1);
  CHECK(cursor.sleepers == 0);
  return arch.num_yields;
}

TEST_CASE("a rank sleeps after few yields to other threads, and after many idle ones") {
  SpinBudget budget;
  CHECK(yields_before_sleep(budget, Yielded::kShort) == SpinBudget::kMaxYields);
  CHECK(yields_before_sleep(budget, Yielded::kCoreIdle) == SpinBudget::kMaxIdleYields);
  CHECK(yields_before_sleep(budget, Yielded::kLong) == 1);
  CHECK(yields_before_sleep(budget, Yielded::kCoreIdle) == 0);  // for the next waits
}

cpu_set_t allowed_cores() {
  cpu_set_t cores;
  REQUIRE(::sched_getaffinity(0, sizeof(cores), &cores) == 0);
  return cores;
}

TEST_CASE("a wake reaches all who sleep on the word") {
  testing::NoStop source;
  const host::HostArch arch(source, 0);
  std::uint64_t word = 0;
  std::atomic<int> num_asleep = 0, num_woken = 0;
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 3; ++i)
    sleepers.emplace_back([&] {
      const timespec limit{.tv_sec = 20, .tv_nsec = 0};
      ++num_asleep;
      const auto status = ::syscall(SYS_futex, &word, FUTEX_WAIT, 0, &limit, nullptr, 0);
      num_woken += status == 0 || errno == EAGAIN;
    });
  while (num_asleep < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // mostly, they sleep by then
  __atomic_store_n(&word, ~std::uint64_t{0}, __ATOMIC_SEQ_CST);
  arch.wake(word);
  for (std::thread& sleeper : sleepers) sleeper.join();
  CHECK(num_woken == 3);
}

TEST_CASE("a rank woken on its waker's core leaves it, if there are enough cores") {
  const cpu_set_t allowed = allowed_cores();
  const int num_cores = CPU_COUNT(&allowed);
  if (num_cores < 2) {
    MESSAGE("skipped: one core, and nowhere to go");
    return;
  }
  testing::NoStop source;
  const auto pin_to = [](const cpu_set_t& cores) {
    REQUIRE(::sched_setaffinity(0, sizeof(cores), &cores) == 0);
  };
  const host::HostArch arch(source, 0);
  std::uint32_t core = 0;
  arch.leave_core(core);  // no core
  // The kernel may move the thread at any time, so it must have left at least once.
  bool has_left = false;
  for (int i = 0; i < 100 && !has_left; ++i) {
    arch.record_core(core);
    arch.leave_core(core);
    has_left = ::sched_getcpu() + 1 != static_cast<int>(core);
    const cpu_set_t after = allowed_cores();
    REQUIRE(CPU_EQUAL(&after, &allowed));
  }
  CHECK(has_left);

  // With one core allowed it has nowhere to go, and stays pinned.
  cpu_set_t only_core;
  CPU_ZERO(&only_core);
  CPU_SET(::sched_getcpu(), &only_core);
  pin_to(only_core);
  arch.record_core(core);
  arch.leave_core(core);
  const cpu_set_t pinned = allowed_cores();
  CHECK(CPU_EQUAL(&pinned, &only_core));
  pin_to(allowed);
}

TEST_CASE("the clock of waits: time in which nobody reads it counts a second") {
  const auto begin = RunningClock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  CHECK(RunningClock::now() - begin <= std::chrono::seconds(1));
}

}  // namespace
