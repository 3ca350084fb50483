#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

// What the library needs from the system: pages, forks, limits, its clock, its errors, random bits.

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

/// The smallest limits of this process's cgroup, of version 2, and its ancestors. They hold for all
/// processes of the cgroup together.
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

/// Whether the kernel keeps its time by the cycle counter, as a file of its clock source says. It
/// then has compared the counters of all sockets. False where the file cannot be read.
bool kernel_uses_cycle_counter(const char* clocksource);

namespace host {

/// That the system call `what` has failed with the error `code`, and what to do about it.
std::string describe_errno(const std::string& what, int code);
/// Throws that of `what`, which has just failed and set errno.
[[noreturn]] void throw_errno(const std::string& what);

/// Bits that nobody can guess.
std::uint64_t random_number();
/// 32 hexadecimal digits of 128 such bits.
std::string random_text();

}  // namespace host
}  // namespace ringcomm
