#pragma once

#include <memory>

#include "collectives/carrier.h"
#include "collectives/carrier_registry.h"
#include "collectives/communicator_options.h"
#include "transport/key_value_store.h"
#include "transport/peer_table.h"
#include "transport/shm/rendezvous.h"

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

}  // namespace ringcomm
