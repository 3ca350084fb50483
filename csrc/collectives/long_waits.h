#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "collectives/flight.h"

namespace ringcomm::flight {

/// Writes to stderr which calls wait for long, and for whom: a collective by one rank of a machine.
/// A rank that waits for a process that sleeps outside of calls is idle, as a server is between two
/// requests: a group says that once.
class LongWaits {
 public:
  /// Looks at the calls that `memory` records, of the groups `logs`. Every few seconds.
  void look(const Memory& memory, const std::set<Log*>& logs);

 private:
  struct Wait {
    std::uint64_t begin_ticks = 0;  ///< of a message: when it was first seen to be waited for
    std::size_t num_said = 0;
    /// Of the process that it waits for, when the wait was seen or said; none if that is not here.
    std::optional<std::uint64_t> cpu_ms = {};
    std::uint64_t cpu_seen_ns = 0;
  };

  static bool is_idle(const Log& log, const Event& event, Wait& wait);
  static bool is_said_by_another(const Log& log, const Event& event);
  static std::string text_of(const Log& log, const Event& event, const Wait& wait,
                             const Clock& clock, bool is_idle);

  std::map<std::uint64_t, Wait> waits_;  // by the numbers of the calls
};

/// The shell's command that writes the doctor's verdict on this process's job to stderr: it runs
/// for a wait of 60 s. Its signals are blocked. Once for each process.
void set_doctor(const std::string& command);

}  // namespace ringcomm::flight
