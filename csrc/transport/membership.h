#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

#include "core/arch.h"
#include "core/errors.h"

namespace ringcomm {

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that failed
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;

  std::string to_text() const;
  static AbortReason from_text(const std::string& text);
};

/// A process in error messages: "rank 1 (pid 12 on host)".
std::string name_of_process(int rank, std::int64_t pid, bool is_pid_hidden,
                            const std::string& host);

/// The end of an error message about a process that has ended, from its last message (may be
/// empty).
std::string why_it_ended(const std::string& last_words);

/// What another group knows about the ranks' processes. Both functions may be empty.
struct KnownProcesses {
  std::function<bool(int rank)> has_died = {};
  std::function<bool(int rank)> is_stopped = {};
};

/// The ranks of a group and its shared abort state.
class Membership {
 public:
  virtual ~Membership() = default;

  /// Its number in this process's PID namespace, or in its own where that hides it.
  virtual pid_t pid_of(int rank) const = 0;
  virtual bool is_pid_hidden(int) const { return false; }
  virtual const std::string& host_of(int rank) const = 0;
  /// Whether this rank may wait for `rank`, from what it knows without waiting: kNone, kPeerDied,
  /// kPeerLeft or, for the whole group, kAborted.
  virtual Stop state_of(int rank) const = 0;
  /// Whether the process of `rank` is known to have ended; also of a group that has been aborted.
  virtual bool has_died(int) const { return false; }
  /// Whether it ended by itself and not by a signal, or is about to; false if that is not known.
  virtual bool has_exited(int) const { return false; }
  /// The number of collectives that `rank` has begun; -1 if that is not known.
  virtual std::int64_t num_calls_of(int) const { return -1; }
  /// Whether the process of `rank` is stopped (SIGSTOP), as far as the kernel tells.
  virtual bool is_stopped(int) const { return false; }

  /// Why the process of `rank` ended, as it reported itself; empty if it reported nothing.
  virtual std::string last_words_of(int) const { return {}; }

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
