#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "transport/messages/message_subset.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_watch.h"
#include "transport/peer_table.h"
#include "transport/wait_limits.h"

namespace ringcomm {

/// The state in which collectives of ranks on several hosts run, one after another, on one thread
/// at a time: shared memory inside a host, messages between hosts.
///
/// There are two numberings: a rank is a number in the group; a local rank is a number among its
/// host's ranks, and only calls of run_local() use it.
class HostsEngine {
 public:
  /// `local` runs the collectives of this host's ranks; null if there is only one. All arguments
  /// must outlive this object.
  HostsEngine(const PeerTable& peer_table, int rank, Carrier* local, MessageTransport& transport,
              const MessageEngine::Cut& cut);

  const PeerTable& peer_table() const { return peer_table_; }
  int rank() const { return rank_; }
  int world_size() const { return peer_table_.world_size(); }
  int host() const { return peer_table_.host_of(rank_); }
  int local_rank() const { return peer_table_.local_rank_of(rank_); }
  int local_size() const { return peer_table_.num_ranks_on(host()); }
  /// The ranks of this host, by local rank.
  const std::vector<int>& local_ranks() const { return peer_table_.ranks_on(host()); }
  bool is_leader() const { return local_rank() == 0; }
  bool is_local(int rank) const { return peer_table_.host_of(rank) == host(); }

  /// Starts a collective; all must live until finish() or drop().
  void begin(MessageWatch::Operation& operation, const CallHeader& header,
             const WaitLimits& limits);
  /// Ends it: waits for all sends. Throws Stopped.
  void finish();
  /// Ends one that failed; the transport has been aborted.
  void drop();

  /// Runs a collective of this host's ranks as a part of the current one; `call` numbers them from
  /// 0. Throws Stopped and Mismatched with the group's numbers. Counts the bytes if `is_data`.
  void run_local(const Collective& call, bool is_data = true);

  /// Messages of all ranks, and of the leaders (where this rank is one), by host.
  MessageEngine& all() { return all_; }
  MessageEngine& leaders() { return *leaders_; }
  /// Messages of `ranks`, this one among them, numbered in their order, until finish().
  MessageEngine& among(const std::vector<int>& ranks);

  /// Runs `body`, which numbers ranks by their index in `ranks`; its exceptions are translated to
  /// the numbers in `ranks`.
  template <class Body>
  void in_numbers_of(const std::vector<int>& ranks, const Body& body) {
    const auto global = [&](int peer) {
      return peer >= 0 ? ranks[static_cast<std::size_t>(peer)] : peer;
    };
    try {
      body();
    } catch (Stopped& stopped) {
      stopped.peer = global(stopped.peer);
      throw;
    } catch (Mismatched& mismatched) {
      mismatched.peer = global(mismatched.peer);
      throw;
    }
  }

  /// Memory until the collective ends, aligned for any element; for the messages of all engines.
  std::byte* stage(std::size_t num_bytes) { return all_.stage(num_bytes); }
  void count_sent(std::uint64_t num_bytes) { traffic_.sent_bytes += num_bytes; }
  /// Whether a wait of run_local() ended because another rank of this host had failed.
  bool has_heard_of_abort() const { return has_heard_of_abort_; }
  /// The traffic of the current collective.
  const Traffic& traffic() const { return traffic_; }

 private:
  WaitLimits limits_left() const;

  const PeerTable& peer_table_;
  int rank_;
  Carrier* local_;
  MessageTransport& transport_;
  MessageEngine::Cut cut_;
  MessageEngine all_;
  std::unique_ptr<MessageSubset> leaders_subset_;  // null on ranks that lead no host
  std::unique_ptr<MessageEngine> leaders_;
  std::unique_ptr<MessageSubset> some_subset_;  // of among()
  std::unique_ptr<MessageEngine> some_;

  MessageWatch::Operation* operation_ = nullptr;
  const CallHeader* header_ = nullptr;
  const WaitLimits* limits_ = nullptr;
  std::chrono::steady_clock::time_point deadline_;
  Traffic traffic_;
  bool has_heard_of_abort_ = false;
};

}  // namespace ringcomm
