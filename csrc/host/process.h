#pragma once

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// What the library needs from the process that it is in: pages, forks, threads, waits, limits.

namespace ringcomm {

/// The size of a page: 4 KiB, or 16 or 64 KiB on some arm64 systems.
inline std::size_t page_bytes() {
  static const auto num_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return num_bytes;
}

/// Rounded up to whole pages.
inline std::size_t whole_pages(std::size_t num_bytes) {
  return (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

/// The number of forks between the process that loaded the library and this one. An object of
/// another generation was inherited by fork(), without its threads, and must not be used.
int process_generation();

/// One T for each process, for static variables with constant initialization: created at the first
/// use and never destroyed, because its users may outlive any order of destruction. A forked child
/// gets its own T, because another thread may have locked the parent's during the fork.
template <class T>
class PerProcess {
 public:
  /// Makes it if need be. Throws what T's constructor does.
  T& get() {
    for (;;) {
      Made* made = made_.load(std::memory_order_acquire);
      if (is_mine(made)) return made->object;
      auto fresh = std::make_unique<Made>();
      if (made_.compare_exchange_strong(made, fresh.get(), std::memory_order_acq_rel))
        return fresh.release()->object;
    }
  }

  /// Null before the first get() of this process.
  T* find() const {
    Made* made = made_.load(std::memory_order_acquire);
    return is_mine(made) ? &made->object : nullptr;
  }

 private:
  struct Made {
    T object;
    int generation = process_generation();
  };

  static bool is_mine(const Made* made) {
    return made != nullptr && made->generation == process_generation();
  }

  std::atomic<Made*> made_ = nullptr;
};

/// The stack of a thread of the library: the program's default, 8 MiB in most, counts in full
/// against RLIMIT_DATA, and the engine and torch's operators do not recurse.
inline constexpr std::size_t kThreadStackBytes = std::size_t{1} << 20;
/// The program's default, for a thread that runs Python.
inline constexpr std::size_t kDefaultStackBytes = 0;

/// The handle of a thread of the library, to be joined or detached once.
class BackgroundThread {
 public:
  BackgroundThread() = default;
  explicit BackgroundThread(::pthread_t thread) : thread_(thread) {}

  bool joinable() const { return thread_.has_value(); }
  void join() { ::pthread_join(*std::exchange(thread_, std::nullopt), nullptr); }
  void detach() { ::pthread_detach(*std::exchange(thread_, std::nullopt)); }

 private:
  std::optional<::pthread_t> thread_;
};

/// Starts a thread with all signals blocked, because the program's threads handle them. `name`, for
/// debuggers, has 15 characters at most. Throws std::system_error, whose text names the thread and
/// the limits that may be reached.
BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes = kThreadStackBytes);

/// A thread that runs a check periodically while there is work to watch, and sleeps otherwise.
class WatchThread {
 public:
  struct Pace {
    std::chrono::milliseconds interval;
    /// Checks after wake(), and not time: on a busy machine any time may pass without a check.
    std::int64_t num_looks;
  };

  /// `look` returns whether to look again, ever; it throws nothing.
  WatchThread(const char* name, Pace pace, std::function<bool()> look);
  ~WatchThread();

  /// From any thread, `look` among them.
  void wake() { look_for(pace_.num_looks); }
  /// After this call it never sleeps.
  void stay_awake() { look_for(std::numeric_limits<std::int64_t>::max()); }

 private:
  void look_for(std::int64_t num_looks);
  void run();

  Pace pace_;
  std::function<bool()> look_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::int64_t looks_left_ = 0;
  bool is_over_ = false;
  BackgroundThread thread_;  // last: it uses all of the above
};

/// Replaces infinite timeouts: long enough not to matter, short enough to add to a clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// How late a wait may notice a timeout, a death or an interruption. A check for signals takes
/// Python's GIL: it is rare, and never in waits that end immediately.
inline constexpr std::chrono::milliseconds kLookInterval{50};

/// How long an operation may wait, and when it is interrupted.
struct WaitLimits {
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  /// Called by the waiting thread about every kLookInterval; true ends the operation. May be empty.
  std::function<bool()> is_interrupted;
};

/// Called about every kLookInterval while the messenger connects, with the ranks that have
/// not arrived yet. Throws Error if one cannot arrive any more; the caller then checks a last time
/// whether all have arrived, because one may have arrived and ended since.
using LookForRanks = std::function<void(const std::vector<int>& missing)>;

/// The clock of deadlines. Each wait reads it about every kLookInterval; where nobody has for
/// longer than kLongestStop, the process did not run (SIGSTOP, a frozen container), and no more of
/// that counts: a job that was stopped as a whole is not late.
struct RunningClock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<RunningClock>;
  static constexpr bool is_steady = true;
  static constexpr std::chrono::seconds kLongestStop{1};

  static time_point now();
};

/// `timeout` from now; the end of time where the clock does not count that far.
inline RunningClock::time_point deadline_after(std::chrono::milliseconds timeout) {
  using TimePoint = RunningClock::time_point;
  const TimePoint now = RunningClock::now();
  // Compared in milliseconds: the clock's nanoseconds would overflow first.
  const auto countable = std::chrono::floor<std::chrono::milliseconds>(TimePoint::max() - now);
  return timeout < countable ? now + timeout : TimePoint::max();
}

/// Sleeps between two looks at something that other processes change: longer each time, up to
/// kLookInterval.
class Backoff {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min<std::chrono::microseconds>(2 * pause_, kLookInterval);
  }
  void reset() { *this = {}; }

 private:
  std::chrono::microseconds pause_{200};
};

/// Writes a line to the error output, or drops it where that has no room: nobody may wait for who
/// reads it.
void say_line(const std::string& line) noexcept;

/// The smallest limits of this process's cgroup and its ancestors, version 1 or 2. They hold for
/// all processes of the cgroup together.
struct CgroupLimits {
  struct Limit {
    double value;
    std::string file;  ///< that sets it
  };
  std::optional<Limit> cpu_cores;  ///< CPU time per time
  std::optional<Limit> memory_bytes;
};

/// Reads them; `proc` is the process's folder and `cgroups` where cgroups are mounted.
CgroupLimits read_cgroup_limits(const std::string& proc, const std::string& cgroups);
/// Those of this process when it first asked.
const CgroupLimits& cgroup_limits();

}  // namespace ringcomm
