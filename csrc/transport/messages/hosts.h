#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "host/rank_record.h"
#include "transport/messages/exchange.h"
#include "transport/transport.h"

namespace ringcomm {

/// What `values` has for a rank or a host.
template <class Values>
auto& of(Values& values, int number) {
  return values[static_cast<std::size_t>(number)];
}

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

/// One collective of one rank, and what its algorithms need. A rank is a number in the group; a
/// local rank is a number among its host's ranks, and only calls of run_local() use it. Over
/// messages alone every rank is a host.
///
/// Every algorithm waits for a run_local() before it waits for a message: that compares the calls
/// of the host's ranks, so that from then on they are one (docs/design/messages.md).
struct HostsCall {
  const HostsView& hosts;
  Transport* local;  ///< of this host's ranks; null if there is one, or messages only
  MessageExchange& exchange;
  const Collective& call;
  const WaitLimits& limits;
  RunningClock::time_point deadline = deadline_after(limits.timeout);
  Traffic traffic = {.algorithm = call.algorithm};  ///< of the parts inside the host
  int rank = hosts.rank;
  int world_size = hosts.table.world_size();
  std::size_t element_bytes = ringcomm::element_bytes(call.dtype);

  int num_hosts() const { return hosts.num_hosts(); }
  bool is_ring() const { return call.algorithm == Algorithm::kRing; }
  bool is_elsewhere(int peer) const { return hosts.table.host_of(peer) != hosts.host; }
  int leader_at(int distance) const {
    return hosts.table.leader_of((hosts.host + distance) % num_hosts());
  }
  int previous_leader() const { return leader_at(num_hosts() - 1); }
  std::size_t bytes(std::size_t num_elems) const { return num_elems * element_bytes; }

  void send(int peer, const void* data, std::size_t num_elems) const {
    exchange.send(peer, data, bytes(num_elems));
  }
  void recv(int peer, void* data, std::size_t num_elems) const {
    exchange.recv(peer, data, bytes(num_elems));
  }
  /// The leader of each host but the first receives from the one before it, if only a header, and
  /// before anything else: if calls differ, those of two such neighbours do, and the second notices
  /// it, whatever their patterns. The first host's leader waits for nobody here. The arguments say
  /// whether this rank sends data to the next leader at once, and receives such from the one
  /// before; otherwise how much is sent later.
  void compare_hosts(bool sends_to_next, bool receives_from_previous, std::size_t sent_elems = 0,
                     std::size_t received_elems = 0) const;
  /// Runs a part of the call by this host's ranks, if there are several, which `part` numbers from
  /// 0. Throws WaitFailed and Mismatched with the group's numbers.
  void run_local(Collective part);

  /// Calls post(k) for all pieces in order, and complete(k) once piece k + 1 is posted: messages
  /// are on their way while this host's ranks work on another piece. All is sent in the end.
  template <class Post, class Complete>
  void in_pieces(int step, int num_steps, std::size_t num_pieces, const Post& post,
                 const Complete& complete) const {
    for (std::size_t idx = 0; idx <= num_pieces; ++idx) {
      exchange.step() = {step, num_steps, std::max<std::size_t>(1, idx), num_pieces};
      exchange.use_batch(idx);
      if (idx < num_pieces) post(idx);
      exchange.use_batch(idx + 1);
      if (idx > 0) complete(idx - 1);
    }
    exchange.finish_all();
  }
};

/// The maximum of other ranks' data that a rank stages at a time; larger buffers are cut into
/// pieces. The latency of a message is small next to what it takes on a fast network.
inline constexpr std::size_t kStagingBytes = std::size_t{8} << 20;
/// A slice of a ring or chain: the longest with a tag of its size. Two are received at a time, and
/// two that were received before, or their sums, are sent.
inline constexpr std::size_t kSliceBytes = MessageTags::kMaxSized;
inline constexpr std::size_t kNumSlots = 4;

/// Sets the algorithm of a collective over messages alone, from values that are equal on all ranks.
void plan_message_collective(int world_size, const CommunicatorOptions& options, Collective& call);
/// Runs any collective, with kHierarchical host by host (docs/design/messages.md), otherwise over
/// messages alone. Checks the header of every peer before its data, and the previous rank's or
/// host's in every collective, so some rank detects any difference. Throws WaitFailed, Mismatched.
Traffic run_message_collective(HostsCall call, const HostsView& flat);
/// Of all ranks, by chunks, each of which crosses the network once per host.
void run_by_chunks(HostsCall& call);

}  // namespace ringcomm
