#pragma once

#include <cstddef>
#include <sstream>
#include <string>

#include "collectives/algorithm.h"

namespace ringcomm {

/// The options of a group; must be equal on all its ranks.
struct CommunicatorOptions {
  Algorithm algorithm = Algorithm::kAuto;  ///< of all_reduce
  bool is_rank_ordered = false;            ///< reductions equal to the left-to-right sum over ranks
  std::size_t one_shot_max_bytes = 0;      ///< where one_shot ends; 0: as was measured for us
  std::string transport = {};              ///< "shm", "messages", or "": by where the ranks are
  std::string message_backend = {};        ///< what carries messages, where anything does
  /// Where this rank is; empty: found out. This and what follows may differ between ranks.
  std::string host_id = {};
  int max_threads = 0;             ///< of this rank, for its copies and sums; see host::Workers
  bool log_waits = true;           ///< long waits are written to stderr (long_waits.h)
  bool report_stragglers = false;  ///< at the end

  /// "algorithm=auto deterministic=none one_shot_max_bytes=0 ..."
  std::string to_text() const {
    std::ostringstream text;
    text << "algorithm=" << name_of(algorithm)
         << " deterministic=" << (is_rank_ordered ? "rank_order" : "none")
         << " one_shot_max_bytes=" << one_shot_max_bytes
         << " transport=" << (transport.empty() ? "auto" : transport);
    if (!message_backend.empty()) text << " message_backend=" << message_backend;
    return text.str();
  }
};

}  // namespace ringcomm
