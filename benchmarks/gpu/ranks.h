#pragma once

// Ranks as forked processes, and the page of host memory that they share.

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver/driver_api.h"
#include "cuda/kernels/staging.h"
#include "host/process.h"

namespace ringcomm::benchmarks {

using Clock = std::chrono::steady_clock;

inline double us_since(Clock::time_point began) {
  return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
}

/// What the ranks tell each other. A rank writes its own entries, and reads the others' between two
/// barriers.
struct Page {
  static constexpr std::chrono::seconds kBarrierTimeout{60};

  int num_ranks = 1;
  std::atomic<int> num_arrived = 0;
  std::atomic<int> num_barriers = 0;
  std::atomic<bool> has_failed = false;
  /// By rank: one end to read from, which is the rank's, and one that its peers write to.
  std::array<std::array<int, 2>, cuda::kMaxRanks> mailboxes = {};
  std::array<double, cuda::kMaxRanks> us = {};
  std::array<std::uint64_t, cuda::kMaxRanks> num_wrong = {};

  /// Throws where a rank has failed, or does not come.
  void barrier() {
    const int before = num_barriers;
    if (num_arrived.fetch_add(1) == num_ranks - 1) {
      num_arrived = 0;
      num_barriers = before + 1;
      return;
    }
    const Clock::time_point deadline = Clock::now() + kBarrierTimeout;
    while (num_barriers == before) {
      if (has_failed) throw std::runtime_error("another rank has failed");
      if (Clock::now() > deadline) throw std::runtime_error("a rank did not arrive in 60 s");
      sched_yield();
    }
  }
  /// The largest of all ranks' values. Collective.
  double slowest(int rank, double value) {
    us[static_cast<std::size_t>(rank)] = value;
    barrier();
    const double most = *std::max_element(us.begin(), us.begin() + num_ranks);
    barrier();
    return most;
  }
};

/// The word that ends this rank's kernels, once there is one.
inline std::atomic<volatile std::uint32_t*> abort_word = nullptr;
/// How long a rank may take to end after that: under MPS a client that is killed within a kernel
/// takes the server along, and with it all later measurements.
inline constexpr std::chrono::seconds kEndPatience{2};

inline void end_kernels(int) {
  if (volatile std::uint32_t* word = abort_word) *word = 1;
}

/// Forks `num_ranks` processes that call run(rank, page); returns 0 if all return true. Where one
/// fails, the others end at their next barrier. After `limit` the kernels of those that are left
/// are ended, and then the processes.
template <class Run>
int run_ranks(int num_ranks, std::chrono::seconds limit, const Run& run) {
  void* shared =
      mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("no memory for the ranks' page");
  auto& page = *new (shared) Page;
  page.num_ranks = num_ranks;
  for (int rank = 0; rank < num_ranks; ++rank)
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, page.mailboxes[rank].data()) != 0)
      host::throw_errno("socketpair");
  std::vector<pid_t> alive;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) page.has_failed = true;
    if (pid != 0) {
      if (pid > 0) alive.push_back(pid);
      continue;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == 1) _exit(1);
    signal(SIGTERM, end_kernels);
    bool is_right = false;
    try {
      is_right = run(rank, page);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "kernel_sweep: rank %d: %s\n", rank, error.what());
      page.has_failed = true;
    }
    std::fflush(nullptr);
    _exit(is_right ? 0 : 1);
  }
  bool is_right = !page.has_failed;
  Clock::time_point deadline = Clock::now() + limit;
  bool is_ending = false;
  while (!alive.empty()) {
    for (std::size_t i = alive.size(); i-- > 0;) {
      int status = 0;
      if (waitpid(alive[i], &status, WNOHANG) == 0) continue;
      alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(i));
      if (status == 0) continue;
      is_right = false;
      // The others see it at their next barrier; a rank with wrong results comes to all of them.
      if (!WIFEXITED(status)) page.has_failed = true;
    }
    if (Clock::now() > deadline) {
      is_right = false;
      page.has_failed = true;
      for (const pid_t pid : alive) kill(pid, is_ending ? SIGKILL : SIGTERM);
      if (!std::exchange(is_ending, true))
        std::fprintf(stderr, "kernel_sweep: stopped after %lld s\n",
                     static_cast<long long>(limit.count()));
      deadline = Clock::now() + kEndPatience;
    }
    usleep(1000);
  }
  for (int rank = 0; rank < num_ranks; ++rank)
    for (const int end : page.mailboxes[rank]) close(end);
  munmap(shared, sizeof(Page));
  return is_right ? 0 : 1;
}

}  // namespace ringcomm::benchmarks
