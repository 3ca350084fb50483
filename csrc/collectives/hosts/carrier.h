#pragma once

#include <memory>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/hosts/engine.h"
#include "transport/membership.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_watch.h"
#include "transport/messages/store_membership.h"
#include "transport/peer_table.h"

namespace ringcomm {

/// Collectives of ranks on several hosts, at least one of which has several ranks: shared memory
/// inside a host, messages between hosts. All sends and receives of users go over messages, so that
/// a receive from any source sees every rank.
///
/// A rank that fails reports it twice: in its host's shared memory, for the ranks of its host, and
/// in the store. Every rank's watchdog reads the store and copies the report to its host's memory.
class HostsCarrier final : public Carrier {
 public:
  /// Collective over the group, whose ranks have been found. Throws Error.
  HostsCarrier(KeyValueStore& store, shm::Rendezvous& ranks, const PeerTable& peer_table,
               const CommunicatorOptions& options, const MakeMessages& make_messages);
  ~HostsCarrier() override { members_.leave(); }

  Membership& membership() override { return members_; }
  std::unique_ptr<PointToPoint> make_p2p(Failure& failure, Stats& stats) override;
  bool runs_in_caller() const override { return false; }
  void plan(const Collective& call, CallHeader& header) const override;
  Traffic run(const Collective& call, const CallHeader& header, const WaitLimits& limits) override;
  std::size_t mapped_bytes() const override {
    return local_ != nullptr ? local_->mapped_bytes() : 0;
  }

 private:
  void tell_host();
  bool is_flat(const Collective& call) const;
  void dispatch(const Collective& call, const CallHeader& header);

  CommunicatorOptions options_;
  PeerTable peer_table_;
  StoreMembership members_;
  std::unique_ptr<Carrier> local_;  // null on a host with one rank
  std::unique_ptr<MessageTransport> transport_;
  MessageWatch watch_;
  MessageEngine planner_;  // of all ranks over messages, for calls that take that way
  HostsEngine engine_;
};

}  // namespace ringcomm
