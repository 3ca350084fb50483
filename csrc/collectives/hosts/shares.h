#pragma once

#include "collectives/hosts/agreement.h"
#include "collectives/hosts/engine.h"
#include "collectives/messages/shares.h"

namespace ringcomm {

/// reduce_scatter and all_gather over hosts, with chunks of any sizes. Each chunk crosses the
/// network once per host, and the transfers are distributed over the ranks.
///
/// For a rank on another host, one of this host's ranks is its courier: the one of its own local
/// rank, modulo this host's size. If the other host has more ranks, a courier serves several of
/// them in turns.

/// Leaves this rank's chunk, reduced over all ranks, in its output. The ranks of a host reduce what
/// they have for each rank, its courier sends that, and the owner adds up the hosts in their order:
/// one rounding inside a host, and one between them.
void hosts_reduce_scatter(HostsEngine& engine, const CallHeader& header,
                          const MessageShares& shares, HostsGreeting& greeting);

/// Every rank's chunk is in its own output before, and in all ranks' after. A rank sends its chunk
/// to its courier on each other host, and the ranks there copy it.
void hosts_all_gather(HostsEngine& engine, const CallHeader& header, const MessageShares& shares,
                      HostsGreeting& greeting);

}  // namespace ringcomm
