#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/shared_memory.h"

namespace ringcomm {

namespace host {
class PeerMemory;
}  // namespace host

/// A value that a thread replaces while others read it.
template <class Value>
class Replaced {
 public:
  Value operator()() const {
    const std::lock_guard lock(mutex_);
    return value_;
  }
  void keep(Value value) {
    const std::lock_guard lock(mutex_);
    value_ = std::move(value);
  }

 private:
  mutable std::mutex mutex_;
  Value value_ = {};
};

/// Another process, watched until it ends if it is on this machine.
struct PeerProcess {
  explicit PeerProcess(pid_t its_pid = -1, std::string its_host = {}, std::string address = {})
      : pid(its_pid), host(std::move(its_host)), bootstrap_address(std::move(address)) {}

  /// In this process's numbering, or its own where another PID namespace hides it.
  pid_t pid;
  std::string host;               ///< its name, for messages
  std::string bootstrap_address;  ///< of its Bootstrap; empty if it is not, or was never, watched
  bool is_pid_hidden = false;
  /// So it is the one of that address, and tells this process why it fails.
  std::atomic<bool> has_answered = false;
  std::atomic<bool> is_stranger = false;  ///< another process has answered for it
  std::atomic<bool> is_dead = false;      ///< ended, or runs another program
  /// The processes that this one has seen end; increased after is_dead.
  static std::atomic<std::uint64_t> num_ended;
  /// By itself, as far as it or the kernel has told; known before is_dead is set, as the next.
  std::atomic<bool> has_exited = false;
  /// What is_dead means: it has ended; it runs another program, or has closed all descriptors; or
  /// this process has.
  enum class Gone { kEnded, kRunsOn, kUnwatched };
  std::atomic<Gone> gone = Gone::kEnded;
  /// As wait() gives it; -1 if the kernel does not tell.
  std::atomic<int> exit_status = -1;

  /// Whether it is stopped by SIGSTOP or a debugger; false if the kernel does not tell.
  bool is_stopped() const;
  /// The CPU time that it has taken; none if the kernel does not tell.
  std::optional<std::uint64_t> cpu_ms() const;
  /// Its last report of why it ends, such as an uncaught exception; printable(), and may be empty.
  Replaced<std::string> exit_reason;
  /// Why it does not let this process watch it, or accepts no connections now; printable(), and
  /// empty if it does.
  Replaced<std::string> refusal;
  /// It has ended: asks the kernel how. `pidfd` may be -1.
  void end(int pidfd);
  /// The end of an error message about it: " died (signal 9, Killed); read the end of its output".
  /// `when` and `detail` may be empty.
  std::string how_it_ended(const std::string& when, const std::string& detail) const;
  /// Its flight recorder, as this process maps it, also after its end; null if it has sent none.
  Replaced<std::shared_ptr<const host::SharedMemory>> recorder;
  /// Its buffers, as this process maps them; one for all groups that hold the pointer.
  std::shared_ptr<host::PeerMemory> memory() const;

 private:
  mutable std::mutex mutex_;  // guards the next one
  mutable std::weak_ptr<host::PeerMemory> memory_;
};

/// By rank. Of this rank's own process, and of one on another machine, only pid and host are known.
using PeerProcesses = std::vector<std::shared_ptr<PeerProcess>>;

/// Milliseconds since 1970 by the system's clock: now, and when this process began, which is 0 if
/// the kernel does not tell.
std::int64_t time_ms();
std::int64_t start_of_process_ms();

/// What a rank's own messages begin with: "ringcomm rank 0/2: ", with a global rank that differs.
std::string prefix_of(int rank, int world_size, int global_rank);
/// A process in error messages: "rank 1 (pid 12 on host)", "rank 1" if it was never found, or "rank
/// 1 of the group (global rank 3, pid 12 on host)" where the default group numbers it otherwise.
/// `global_rank` is -1 if it has no such number.
std::string name_of_process(int rank, int global_rank, const PeerProcess& process);
/// Ranks in error messages: "ranks 1 and 2" or, where the default group numbers them otherwise,
/// "ranks 1 and 2 of the group (global ranks 4 and 7)". `global_ranks`, by rank, may be empty.
std::string name_of_ranks(const std::vector<int>& ranks,
                          const std::vector<std::uint64_t>& global_ranks);
/// For messages, which must be a line of valid text in Python: other letters become ?.
std::string printable(std::string text);

}  // namespace ringcomm
