/* Two processes pass a flag to and fro; flags.py compiles and calls this.
 *
 * Python's own loop takes longer than the transfer (0.04-0.5 us), so it could not tell whether two
 * cores share a cache. */
#include <sched.h>
#include <stdint.h>
#include <time.h>

/* How often a spinner looks at the clock and lets another program have its core: some 30 us, far longer
 * than any transfer, so that no undisturbed one contains it. */
enum { SPINS_PER_LOOK = 1 << 16 };

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Until *flag >= value, or the deadline has passed (returns 0). */
static int wait_for(const uint64_t* flag, uint64_t value, int64_t deadline_ns) {
  for (uint32_t spins = 1; __atomic_load_n(flag, __ATOMIC_ACQUIRE) < value; ++spins)
    if (spins % SPINS_PER_LOOK == 0) {
      if (now_ns() > deadline_ns) return 0;
      sched_yield();
    }
  return 1;
}

/* `own` is written by this side only, `other` by the other side only, each on a line of its own; they
 * start at `base` or below, and end at base + num_round_trips. side 0 begins.
 * Returns nanoseconds for all round trips, or -1 when the other side did not answer by the deadline
 * (nanoseconds of CLOCK_MONOTONIC). */
int64_t ringcomm_flag_round_trips(uint64_t* own, const uint64_t* other, int side, uint64_t base,
                                  uint64_t num_round_trips, int64_t deadline_ns) {
  const int64_t begin = now_ns();
  for (uint64_t i = base + 1; i <= base + num_round_trips; ++i) {
    if (side == 0) __atomic_store_n(own, i, __ATOMIC_RELEASE);
    if (!wait_for(other, i, deadline_ns)) return -1;
    if (side != 0) __atomic_store_n(own, i, __ATOMIC_RELEASE);
  }
  return now_ns() - begin;
}
