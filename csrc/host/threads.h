#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace ringcomm {

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

/// Runs `work`, which may block and throws nothing, in a helper thread of this process
/// ("ringcomm-helper"). One idle helper stays for the next work; others are there only while
/// several works run. Throws std::system_error.
void run_aside(std::function<void()> work);

/// Writes lines to the error output in such a thread, and then runs `work`: a write to a pipe that
/// nobody reads blocks for ever. What comes meanwhile, or when no thread can start, is lost.
void say_aside(std::string lines, std::function<void()> work = {}) noexcept;

/// A thread ("ringcomm-watch") that runs a check periodically while there is work to watch, and
/// sleeps otherwise.
class WatchThread {
 public:
  struct Pace {
    std::chrono::milliseconds interval;
    /// Checks after wake(), and not time: on a busy machine any time may pass without a check.
    std::int64_t num_looks;
  };

  /// `look` returns whether to look again, ever; it throws nothing.
  WatchThread(Pace pace, std::function<bool()> look);
  ~WatchThread();

  /// From any thread, `look` among them.
  void wake() { look_for(pace_.num_looks); }
  /// The same, for so many checks at least.
  void look_for(std::int64_t num_looks);
  /// After this call it never sleeps.
  void stay_awake() { look_for(std::numeric_limits<std::int64_t>::max()); }

 private:
  void run();

  Pace pace_;
  std::function<bool()> look_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::int64_t looks_left_ = 0;
  bool is_over_ = false;
  BackgroundThread thread_;  // last: it uses all of the above
};

}  // namespace ringcomm
