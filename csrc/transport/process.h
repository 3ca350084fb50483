#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

// What the library needs from the process that it is in: pages, forks, threads, limits.

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

/// One T for each process: created at the first use and never destroyed, because its users may
/// outlive any order of destruction. A forked child gets its own T; the parent's is left unchanged,
/// because another thread may have locked it during the fork.
///
/// For static variables with constant initialization.
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

/// The stack of a thread of the library. The program's default, 8 MiB in most, counts in full
/// against RLIMIT_DATA. These threads run the engine and torch's operators, none of which recurses.
inline constexpr std::size_t kThreadStackBytes = std::size_t{1} << 20;
/// The program's default, for a thread that runs Python.
inline constexpr std::size_t kDefaultStackBytes = 0;

/// A thread of the library: named for debuggers, with all signals blocked, because the program's
/// threads handle them. Must be joined or detached before it is destroyed, like std::thread.
class BackgroundThread {
 public:
  BackgroundThread() = default;
  explicit BackgroundThread(::pthread_t thread) : thread_(thread) {}
  BackgroundThread(BackgroundThread&& other) noexcept
      : thread_(std::exchange(other.thread_, std::nullopt)) {}
  BackgroundThread& operator=(BackgroundThread&& other) noexcept {
    if (joinable()) std::terminate();
    thread_ = std::exchange(other.thread_, std::nullopt);
    return *this;
  }
  ~BackgroundThread() {
    if (joinable()) std::terminate();
  }

  bool joinable() const { return thread_.has_value(); }
  void join() { ::pthread_join(*std::exchange(thread_, std::nullopt), nullptr); }
  void detach() { ::pthread_detach(*std::exchange(thread_, std::nullopt)); }

 private:
  std::optional<::pthread_t> thread_;
};

/// Starts a thread. `name` has 15 characters at most. Throws std::system_error, whose text names
/// the thread and the limits that may be reached.
BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes = kThreadStackBytes);

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
