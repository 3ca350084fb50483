#pragma once

#include "collectives/collective.h"
#include "collectives/communicator_options.h"
#include "collectives/hosts_engine.h"

namespace ringcomm {

/// Collectives over hosts that go through one rank of each host, or straight to the one rank that
/// wants the data. All begin when the ranks have agreed on the call, between hosts too where this
/// is not said otherwise; docs/design/hosts.md has the bytes of each.

/// For short buffers: each host's leader has its sum, the leaders tell each other, and their hosts.
/// Its messages are the first to be waited for: the caller finishes no greeting before.
void hosts_leader_all_reduce(HostsEngine& engine, const Collective& call,
                             const CallHeader& header);

void hosts_broadcast(HostsEngine& engine, const Collective& call, const CallHeader& header,
                     const CommunicatorOptions& options);
void hosts_reduce(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_gather(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_scatter(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_all_to_all(HostsEngine& engine, const Collective& call, const CallHeader& header);
/// Is itself the agreement between hosts.
void hosts_barrier(HostsEngine& engine, const CallHeader& header);

}  // namespace ringcomm
