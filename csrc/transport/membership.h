#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "core/errors.h"
#include "core/stop.h"

namespace ringcomm {

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that gave up
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;
};

/// How an error about a process that has ended goes on, given what it said last (or nothing).
inline std::string why_it_ended(const std::string& last_words) {
  return last_words.empty() ? "; read the end of its output" : ": " + last_words;
}

/// What another group knows of the processes of ranks. Both functions may be empty.
struct KnownProcesses {
  std::function<bool(int rank)> has_died = {};
  std::function<bool(int rank)> is_stopped = {};
};

/// Who the ranks of a group are, and the one place where it says that it has ended.
class Membership {
 public:
  virtual ~Membership() = default;

  virtual pid_t pid_of(int rank) const = 0;
  virtual const std::string& host_of(int rank) const = 0;
  /// Whether `rank` is there to wait for, as far as this rank can tell at once: kNone, kPeerDied,
  /// kPeerLeft or, for the whole group, kAborted.
  virtual Stop state_of(int rank) const = 0;
  /// Whether the process of `rank` is known to have ended; also of a group that has been aborted.
  virtual bool has_died(int) const { return false; }
  /// Whether the process of `rank` is stopped (SIGSTOP), as far as the kernel tells.
  virtual bool is_stopped(int) const { return false; }

  /// Why the process of `rank` ended, as it said itself; empty where it said nothing.
  virtual std::string last_words_of(int) const { return {}; }

  /// Whether a rank has begun to give the group up: what this rank can tell at once or, with
  /// `asks`, after a look where the others tell it. Throws nothing.
  virtual bool is_given_up(bool asks) noexcept = 0;
  /// Writes why the group is given up, unless another rank was faster; all ranks' waits end.
  virtual void abort(const AbortReason& reason) = 0;
  /// The reason that stands; only after a wait ended with Stop::kAborted.
  virtual AbortReason abort_reason() const = 0;
};

}  // namespace ringcomm
