#pragma once

// Ranks as threads that believe to be on several hosts: real shared memory inside one, messages in
// memory between them.

#include <functional>
#include <string>

#include "memory_messages.h"
#include "thread_ranks.h"

namespace ringcomm::testing {

/// Runs body(communicator) on one thread per letter of `placement`, which names its rank's host.
inline void run_hosts_ranks(MemoryNetwork& network, const std::string& placement,
                            const std::function<void(Communicator&)>& body,
                            const CommunicatorOptions& options = {}) {
  MemoryStore store;
  run_threads(static_cast<int>(placement.size()), [&](int rank) {
    CommunicatorOptions mine = options;
    mine.host_id = placement[static_cast<std::size_t>(rank)];
    Communicator communicator(
        store, rank, static_cast<int>(placement.size()), mine, kBound,
        [&](const std::string&, const LookForRanks&) { return network.join(rank); });
    body(communicator);
  });
}

}  // namespace ringcomm::testing
