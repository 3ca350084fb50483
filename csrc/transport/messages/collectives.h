#pragma once

#include <cstdint>
#include <vector>

#include "collectives/call_header.h"
#include "collectives/collective.h"
#include "collectives/communicator_options.h"
#include "collectives/ring.h"
#include "collectives/traffic.h"
#include "host/peer_table.h"
#include "host/process.h"
#include "host/wait_limits.h"
#include "transport/messages/context.h"
#include "transport/messages/shard_table.h"
#include "transport/transport.h"

namespace ringcomm {

/// The ranks of a group by host, as one of them sees them.
struct HostsView {
  HostsView(const PeerTable& peer_table, int own_rank);
  /// Every rank as a host of its own.
  static HostsView flat(int world_size, int own_rank);

  int num_hosts() const { return table.num_hosts(); }
  bool is_flat() const { return num_hosts() == table.world_size(); }
  /// For a rank on another host, one of a host's ranks is its rail peer: the one of its own local
  /// rank, modulo the host's size.
  int rail_peer(int other_rank, int on_host) const;
  /// One rank of each host, by host: the root of its own, if there is one, else the leader.
  std::vector<int> representatives(int root) const;

  PeerTable table;
  int rank;
  int host;
  int local_rank;                // the place among this host's ranks
  std::vector<int> local_ranks;  // of this host
  std::vector<int> other_hosts;  // the previous one is the first
  /// The ranks of other hosts that this host's ranks serve as rail peers, by local rank; -1 for
  /// none. In rounds, because another host may have more ranks.
  std::vector<std::vector<int>> rounds;
};

/// What runs the collectives of a group.
struct MessageGroup {
  const HostsView& hosts;  ///< flat if the group uses messages only
  const HostsView& flat;
  Transport* local;          ///< of this host's ranks; null if there is one, or messages only
  MessageContext& messages;  ///< in an operation
};

/// Sets the algorithm of `header`, of a collective over messages alone, from values that are equal
/// on all ranks.
void plan_message_collective(int world_size, const Collective& call,
                             const CommunicatorOptions& options, CallHeader& header);

/// Runs any collective, with kHierarchical host by host (docs/design/hosts.md), otherwise over
/// messages alone. Checks the header of every peer before its data, and the previous rank's or
/// host's in every collective, so some rank detects any difference. Throws Stopped, Mismatched.
Traffic run_message_collective(const MessageGroup& group, const Collective& call,
                               const CallHeader& header, const WaitLimits& limits);

/// The ring over messages, after headers and sizes have been compared. An all_gather starts with
/// this rank's chunk in its output. Returns the bytes that the next rank consumed.
std::uint64_t run_message_ring(MessageContext& context, const ShardTable& shards,
                               const RingHalves& halves);
/// A large broadcast or reduce in slices along the chain of `ranks`, in the same way: from the root
/// to the rank before it, or from the rank after the root to the root.
std::uint64_t run_message_chain(MessageContext& context, const Collective& call,
                                const std::vector<int>& ranks);

}  // namespace ringcomm
