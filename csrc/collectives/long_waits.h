#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "collectives/record_format.h"

namespace ringcomm::recorder {

struct RecordedGroup;

/// Writes to stderr which calls wait for long, and for whom: a collective by one rank of a machine.
/// A rank that waits for a process that sleeps outside of calls is idle, as a server is between two
/// requests: a group says that once.
class LongWaits {
 public:
  struct Wait {
    std::uint64_t begin_ticks = 0;  ///< of a message: when it was first seen to be waited for
    std::size_t num_said = 0;
    /// Of the process that it waits for, when the wait was seen or said; none if that is not here.
    std::optional<std::uint64_t> cpu_ms = {};
    std::uint64_t cpu_seen_ns = 0;
  };

  /// Looks at the calls that `memory` records, of some groups. Every few seconds.
  void look(const Memory& memory, const std::set<RecordedGroup*>& groups);

 private:
  std::map<std::uint64_t, Wait> waits_;  // by the numbers of the calls
};

/// The shell's command that writes the doctor's verdict on this process's job to stderr: it runs
/// for a wait of 60 s. Its signals are blocked. Once for each process.
void set_doctor(const std::string& command);
/// Runs a command of the shell to its end, as a child of a child. The one in between shares this
/// memory, and ends without SIGCHLD: a program that reaps its children in a handler hears of
/// neither. In a thread in which all signals are blocked.
void run_shell(const std::string& command);

}  // namespace ringcomm::recorder
