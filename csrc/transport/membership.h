#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/arch.h"
#include "core/errors.h"

namespace ringcomm {

/// What the library needs of a store that all ranks of a group share (an adapter to torch's Store).
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;
  /// False when the key is not there now. Throws std::exception when the store cannot be reached.
  virtual bool try_get(const std::string& key, std::string& value) = 0;
  /// Adds to the number at the key (0 if it is missing) and returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t number) = 0;
  /// Sets the key if it is not there yet; where the store cannot tell, in any case.
  virtual void set_first(const std::string& key, const std::string& value) = 0;
  /// Whether a signal has asked this process to stop waiting: for loops that use try_get().
  virtual bool is_interrupted() { return false; }
  /// The same store for another thread: with a connection of its own, where it has connections.
  virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

/// Another process, watched until it ends if it is on this machine.
struct PeerProcess {
  /// In this process's numbering, or its own where another PID namespace hides it.
  pid_t pid = -1;
  bool is_pid_hidden = false;
  std::string bootstrap_address;  ///< of its Bootstrap; empty if it is not, or was never, watched
  std::atomic<bool> is_dead = false;  ///< ended, or runs another program
  /// Ended by itself and not by a signal, or is about to. Known before is_dead is set; false if
  /// neither the process nor the kernel tells.
  std::atomic<bool> has_exited = false;

  /// Whether it is stopped by SIGSTOP or a debugger; false if the kernel does not tell.
  bool is_stopped() const;
  /// Its last report of why it ends, such as an uncaught exception, in printable ASCII. Empty if
  /// there was none.
  std::string last_words() const;
  void keep_last_words(std::string words);
  /// It has ended: asks the kernel how. `pidfd` may be -1.
  void end(int pidfd);

 private:
  mutable std::mutex mutex_;
  std::string last_words_;
};

/// By rank, none null. Of this rank's own process, and of one on another machine, only the pid is
/// known.
using PeerProcesses = std::vector<std::shared_ptr<PeerProcess>>;

/// A process in error messages: "rank 1 (pid 12 on host)".
std::string name_of_process(int rank, const PeerProcess& process, const std::string& host);
/// The end of an error message about a process that has ended, from its last message (may be
/// empty).
std::string why_it_ended(const std::string& last_words);

/// What another group knows about the ranks' processes. Both functions may be empty.
struct KnownProcesses {
  std::function<bool(int rank)> has_died = {};
  std::function<bool(int rank)> is_stopped = {};
};

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that failed
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;

  std::string to_text() const;
  static AbortReason from_text(const std::string& text);
};

/// The ranks of a group and its shared abort state.
class Membership {
 public:
  virtual ~Membership() = default;

  virtual const PeerProcess& process_of(int rank) const = 0;
  virtual const std::string& host_of(int rank) const = 0;
  /// Whether the process of `rank` is known to have ended; also of a group that has been aborted.
  bool has_died(int rank) const { return process_of(rank).is_dead; }
  bool is_stopped(int rank) const { return process_of(rank).is_stopped(); }
  /// Whether this rank may wait for `rank`, from what it knows without waiting: kNone, kPeerDied,
  /// kPeerLeft or, for the whole group, kAborted.
  virtual Stop state_of(int rank) const = 0;
  /// The number of collectives that `rank` has begun; -1 if that is not known.
  virtual std::int64_t num_calls_of(int rank) const = 0;

  /// Whether a rank has begun to abort the group: from what this rank knows or, with `asks`, after
  /// it reads the other ranks' state. Throws nothing.
  virtual bool is_given_up(bool asks) noexcept = 0;
  /// Aborts the group with this reason, unless another rank has aborted it before. Ends all ranks'
  /// waits.
  virtual void abort(const AbortReason& reason) = 0;
  /// The reason of the first rank that aborted; only after a wait ended with Stop::kAborted.
  virtual AbortReason abort_reason() const = 0;
};

}  // namespace ringcomm
