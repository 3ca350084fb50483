#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/communicator_options.h"
#include "collectives/messages/engine.h"
#include "collectives/messages/shares.h"
#include "core/chunk_layout.h"
#include "transport/peer_table.h"
#include "transport/wait_limits.h"

namespace ringcomm {

/// One collective of ranks on several hosts: shared memory inside a host, messages between hosts.
/// docs/design/hosts.md has the paths and their bytes.
///
/// There are two numberings: a rank is a number in the group; a local rank is a number among its
/// host's ranks, and only calls of run_local() use it.
///
/// Before any data depends on it, the ranks of a host compare the call on the board. Between hosts,
/// each leader first receives an envelope of the leader before it, in every collective: in
/// barrier(), or with the data where that is of all hosts. So some rank always detects a difference
/// and reports it to all, and no rank waits for data that will not arrive.
class HostsCollective {
 public:
  /// `local` runs the collectives of this host's ranks; null if there is only one. `messages` has
  /// all ranks, and has begun. All arguments must outlive this object.
  HostsCollective(const PeerTable& peer_table, Carrier* local, MessageEngine& messages,
                  const Collective& call, const CallHeader& header,
                  const CommunicatorOptions& options, const WaitLimits& limits);

  /// Host by host, or as plan_message_collective() has planned it if that is not the algorithm of
  /// the header. Throws Stopped and Mismatched with the group's numbers.
  void run();

  const Traffic& traffic() const { return traffic_; }
  /// Whether a wait on this host ended because another rank of it had failed.
  bool has_heard_of_abort() const { return has_heard_of_abort_; }

 private:
  int num_hosts() const { return peer_table_.num_hosts(); }
  int local_size() const { return static_cast<int>(local_ranks_.size()); }
  bool is_leader() const { return local_rank_ == 0; }
  bool is_local(int rank) const { return peer_table_.host_of(rank) == host_; }
  std::vector<int> representatives(int root) const;
  std::vector<int> served(int host, int turn) const;
  int num_turns(int host) const;
  int courier_of(int rank, int host) const;
  std::size_t piece_elems(const MessageShares& shares) const;

  void agree();
  void barrier();
  void all_reduce();
  void all_reduce_by_leaders();
  void reduce();
  void broadcast();
  void move();
  void reduce_scatter(const MessageShares& shares);
  void all_gather(const MessageShares& shares);

  void run_local(const Collective& call, bool is_data = true);
  void run_alone(const Collective& call) const;
  void reduce_inside(const ElemRange& piece, int local_root, void* to);
  void reduce_between(const std::vector<int>& ranks, const std::byte* own, void* to,
                      std::size_t num_elems, int root_host);
  void broadcast_inside(int local_root, const void* from);
  void move_inside();
  void reduce_for(const std::vector<int>& owners, const MessageShares& shares, std::size_t idx,
                  std::byte* to);
  void share_from(int host, const MessageShares& shares, std::size_t idx);
  void count_sent(std::uint64_t num_bytes) { traffic_.sent_bytes += num_bytes; }

  template <class Body>
  void for_each_other_host(const Body& body) const;
  template <class Post, class Complete>
  void in_pieces(const MessageShares& shares, const Post& post, const Complete& complete);

  const PeerTable& peer_table_;
  Carrier* local_;
  MessageEngine& messages_;
  const Collective& call_;
  const CallHeader& header_;
  const CommunicatorOptions& options_;
  const WaitLimits& limits_;
  std::chrono::steady_clock::time_point deadline_;
  int rank_;
  int world_size_;
  int host_;
  int local_rank_;
  const std::vector<int>& local_ranks_;  // of this host, by local rank
  Traffic traffic_;
  bool has_heard_of_abort_ = false;
};

}  // namespace ringcomm
