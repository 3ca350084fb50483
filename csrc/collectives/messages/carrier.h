#pragma once

#include <memory>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "transport/membership.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_watch.h"
#include "transport/messages/store_membership.h"

namespace ringcomm {

/// Collectives of ranks that exchange messages, whatever carries those.
class MessageCarrier final : public Carrier {
 public:
  /// Collective over the group, whose ranks have been found. Throws Error.
  MessageCarrier(KeyValueStore& store, shm::Rendezvous& ranks, const CommunicatorOptions& options,
                 const MakeMessages& make_messages);
  ~MessageCarrier() override { members_.leave(); }

  Membership& membership() override { return members_; }
  std::unique_ptr<PointToPoint> make_p2p(Failure& failure, Stats& stats) override;
  bool runs_in_caller() const override { return false; }
  void plan(const Collective& call, CallHeader& header) const override;
  Traffic run(const Collective& call, const CallHeader& header, const WaitLimits& limits) override;
  std::size_t mapped_bytes() const override { return 0; }

 private:
  CommunicatorOptions options_;
  StoreMembership members_;
  std::unique_ptr<MessageTransport> transport_;
  MessageWatch watch_;
  MessageEngine engine_;
};

}  // namespace ringcomm
