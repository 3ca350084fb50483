#pragma once

#include <array>
#include <memory>
#include <span>

#include "collectives/carrier.h"
#include "collectives/carrier_registry.h"
#include "collectives/communicator_options.h"
#include "collectives/messages/engine.h"
#include "transport/key_value_store.h"
#include "transport/messages/message_members.h"
#include "transport/messages/message_transport.h"
#include "transport/peer_table.h"

namespace ringcomm {

/// Collectives of ranks that do not all share memory: messages, and shared memory inside the hosts
/// that have several ranks. All sends and receives of users go over messages, so that a receive
/// from any source sees every rank.
///
/// A rank that fails reports it twice: in its host's shared memory, for the ranks of its host, and
/// in the store. Every rank's watchdog reads the store and copies the report to its host's memory.
class HostsCarrier final : public Carrier {
 public:
  /// Collective over the group, whose ranks have been found. Everything goes over messages if
  /// `is_flat`. Throws Error.
  HostsCarrier(KeyValueStore& store, shm::Rendezvous& ranks, const PeerTable& peer_table,
               const CommunicatorOptions& options, const MakeMessages& make_messages, bool is_flat);
  ~HostsCarrier() override { members_.leave(); }

  Membership& membership() override { return members_; }
  std::unique_ptr<PointToPoint> make_p2p(Failure& failure, Stats& stats) override;
  bool runs_in_caller() const override { return false; }
  std::span<const Algorithm> all_reduce_algorithms() const override { return kAlgorithms; }
  void plan(const Collective& call, CallHeader& header) const override;
  Traffic run(const Collective& call, const CallHeader& header, const WaitLimits& limits) override;
  std::size_t mapped_bytes() const override {
    return local_ != nullptr ? local_->mapped_bytes() : 0;
  }

 private:
  static constexpr std::array kAlgorithms = {Algorithm::kAuto, Algorithm::kOneShot,
                                             Algorithm::kTwoShot, Algorithm::kRing};

  void tell_host();
  bool is_flat(const Collective& call) const;

  CommunicatorOptions options_;
  PeerTable peer_table_;
  bool is_flat_;
  MessageMembers members_;
  std::unique_ptr<Carrier> local_;  // null on a host with one rank, and if all goes over messages
  std::unique_ptr<MessageTransport> transport_;
  MessageEngine messages_;
};

}  // namespace ringcomm
