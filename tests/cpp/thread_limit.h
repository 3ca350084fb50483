#pragma once

// Simulates threads that cannot be started, as at a container's pids.max. The linker redirects all
// pthread_create() calls of the engine to thread_limit.cc (-Wl,--wrap, see the Makefile).

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
