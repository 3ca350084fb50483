#pragma once

#include "collectives/collective.h"
#include "collectives/communicator_options.h"
#include "collectives/hosts/engine.h"

namespace ringcomm {

/// Collectives over hosts that go through one rank of each host, or straight to the one rank that
/// wants the data. All begin when the ranks of each host have agreed on the call, and see to it
/// that the hosts do; docs/design/hosts.md has the bytes of each.

/// For short buffers: each host's leader has its sum, the leaders tell each other, and their hosts.
void hosts_leader_all_reduce(HostsEngine& engine, const Collective& call, const CallHeader& header);

void hosts_broadcast(HostsEngine& engine, const Collective& call, const CallHeader& header,
                     const CommunicatorOptions& options);
void hosts_reduce(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_gather(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_scatter(HostsEngine& engine, const Collective& call, const CallHeader& header);
void hosts_all_to_all(HostsEngine& engine, const Collective& call, const CallHeader& header);
/// The leaders tell each other in steps, and each looks at the other's header: whoever gets past it
/// knows that all ranks have come, to this very call.
void hosts_barrier(HostsEngine& engine, const CallHeader& header);

}  // namespace ringcomm
