#pragma once

// Threads that cannot be had, as where a container's pids.max is reached. The linker has all of the
// engine's calls of pthread_create() go through thread_limit.cc (-Wl,--wrap, see the Makefile).

namespace ringcomm::testing {

/// While it lives, pthread_create() succeeds `num_threads` times and then fails with EAGAIN, for
/// threads of the engine that this thread starts. Those of other threads start as ever.
class ThreadLimit {
 public:
  explicit ThreadLimit(int num_threads);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace ringcomm::testing
