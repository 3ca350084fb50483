#pragma once

#include <pthread.h>

#include <cstddef>
#include <functional>
#include <utility>

namespace ringcomm {

/// The stack of a thread of the library. The program's default, 8 MiB in most, counts in full
/// against RLIMIT_DATA. These threads run the engine and torch's operators, none of which recurses.
inline constexpr std::size_t kThreadStackBytes = std::size_t{1} << 20;
/// The program's default, for a thread that runs Python.
inline constexpr std::size_t kDefaultStackBytes = 0;

/// A thread of the library: named for debuggers, with all signals blocked, because the program's
/// threads handle them, mainly Python's main thread. Must be joined or detached before it is
/// destroyed, like std::thread.
class BackgroundThread {
 public:
  BackgroundThread() = default;
  ~BackgroundThread();
  BackgroundThread(BackgroundThread&& other) noexcept
      : is_joinable_(std::exchange(other.is_joinable_, false)), thread_(other.thread_) {}
  BackgroundThread& operator=(BackgroundThread&& other) noexcept;

  bool joinable() const { return is_joinable_; }
  void join();
  void detach();

 private:
  friend BackgroundThread start_background_thread(const char*, std::function<void()>, std::size_t);

  bool is_joinable_ = false;
  ::pthread_t thread_ = {};
};

/// Starts a thread. `name` has 15 characters at most. Throws std::system_error, whose text names
/// the thread and the limits that may be reached.
BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes = kThreadStackBytes);

}  // namespace ringcomm
