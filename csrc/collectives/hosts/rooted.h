#pragma once

#include "collectives/collective.h"
#include "collectives/hosts/engine.h"

namespace ringcomm {

/// Collectives over hosts that go through one rank of each host, or directly to the root. Each
/// starts after the ranks of each host have agreed on the call, and checks that the hosts agree;
/// the bytes of each are in docs/design/hosts.md.

/// For short buffers: each host's leader has its sum, the leaders tell each other, and their hosts.
void hosts_leader_all_reduce(HostsEngine& engine, const Collective& call, const CallHeader& header);

void hosts_broadcast(HostsEngine& engine, const Collective& call, const CallHeader& header,
                     const CommunicatorOptions& options);
void hosts_reduce(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_gather(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_scatter(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_all_to_all(HostsEngine& engine, const Collective& call, const CallHeader& header);
/// The leaders exchange headers in steps, and each compares the other's. A rank that returns knows
/// that all ranks have arrived at this call.
void hosts_barrier(HostsEngine& engine, const CallHeader& header);

}  // namespace ringcomm
