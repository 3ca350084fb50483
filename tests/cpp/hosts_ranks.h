#pragma once

// Ranks as threads that believe to be on several hosts: real shared memory inside one, messages in
// memory between them. A text places them: each letter is a rank, and names its host. So "aaa" is
// shared memory alone, "abc" messages alone, and "aab" both.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "memory_messages.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace ringcomm::testing {

/// A rank of a group that is placed so.
inline std::unique_ptr<Communicator> make_placed(KeyValueStore& store, MemoryNetwork& network,
                                                 const std::string& placement, int rank,
                                                 CommunicatorOptions options = {}) {
  options.host_id = placement[static_cast<std::size_t>(rank)];
  return std::make_unique<Communicator>(
      store, rank, static_cast<int>(placement.size()), options, kBound,
      [&network, rank](const std::string&, const LookForRanks&) { return network.join(rank); });
}

/// Runs body(communicator) on one thread per rank.
inline void run_placed(MemoryNetwork& network, const std::string& placement,
                       const std::function<void(Communicator&)>& body,
                       const CommunicatorOptions& options = {}) {
  MemoryStore store;
  run_threads(static_cast<int>(placement.size()),
              [&](int rank) { body(*make_placed(store, network, placement, rank, options)); });
}

/// The same on a network of its own, where every message must fit its receive.
inline void run_placed(const std::string& placement, const std::function<void(Communicator&)>& body,
                       const CommunicatorOptions& options = {},
                       std::chrono::microseconds max_delay = {}) {
  CAPTURE(placement);
  MemoryNetwork network(static_cast<int>(placement.size()), max_delay);
  run_placed(network, placement, body, options);
  CHECK(network.num_misfits() == 0);
}

}  // namespace ringcomm::testing
