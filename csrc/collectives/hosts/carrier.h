#pragma once

#include <memory>

#include "collectives/carrier.h"
#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "transport/membership.h"
#include "transport/peer_table.h"
#include "transport/shm/rendezvous.h"
#include "transport/wait_limits.h"

namespace ringcomm {

/// Collectives of ranks that do not all share memory: messages, and shared memory inside the hosts
/// that have several ranks. All sends and receives of users go over messages, so that a receive
/// from any source sees every rank. With `is_flat` everything goes over messages.
///
/// Collective over the group, whose ranks have been found. Throws Error.
std::unique_ptr<Carrier> make_hosts_carrier(KeyValueStore& store, shm::Rendezvous& ranks,
                                            const PeerTable& peer_table,
                                            const CommunicatorOptions& options,
                                            const MakeMessages& make_messages, bool is_flat);

/// A group on several hosts, at least one of which has several of its ranks.
struct HostsGroup {
  const PeerTable& peer_table;
  Carrier* local;  ///< runs the collectives of this host's ranks; null if there is only one
  MessageEngine& messages;  ///< of all ranks, in an operation
  const CommunicatorOptions& options;
};

/// Runs one collective: shared memory inside a host, messages between hosts, with the paths and
/// bytes of docs/design/hosts.md; or over messages alone if the header has another algorithm than
/// kHierarchical. Throws Stopped and Mismatched with the group's numbers.
///
/// Before any data depends on it, the ranks of a host compare the call on the board. Between hosts,
/// each leader first receives an envelope of the leader before it, in every collective: in a
/// barrier, or with the data where that is of all hosts. So some rank always detects a difference
/// and reports it to all, and no rank waits for data that will not arrive.
Traffic run_by_hosts(const HostsGroup& group, const Collective& call, const CallHeader& header,
                     const WaitLimits& limits);

}  // namespace ringcomm
