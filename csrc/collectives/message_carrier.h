#pragma once

#include <chrono>
#include <memory>

#include "collectives/carrier.h"
#include "collectives/communicator_options.h"
#include "collectives/message_engine.h"
#include "transport/key_value_store.h"
#include "transport/messages/message_transport.h"
#include "transport/messages/message_watch.h"
#include "transport/messages/store_membership.h"

namespace ringcomm {

/// Collectives of ranks that exchange messages, whatever carries those.
class MessageCarrier final : public Carrier {
 public:
  /// Collective over the group. Throws Error.
  MessageCarrier(KeyValueStore& store, std::unique_ptr<MessageTransport> transport,
                 const CommunicatorOptions& options, std::chrono::milliseconds timeout);

  Membership& membership() override { return members_; }
  std::unique_ptr<PointToPoint> make_p2p(Failure& failure, Stats& stats) override;
  bool runs_in_caller() const override { return false; }
  void plan(const Collective& call, CallHeader& header) const override;
  Traffic run(const Collective& call, const CallHeader& header, const WaitLimits& limits) override;
  std::size_t mapped_bytes() const override { return 0; }

 private:
  CommunicatorOptions options_;
  std::unique_ptr<MessageTransport> transport_;
  StoreMembership members_;
  MessageWatch watch_;
  MessageEngine engine_;
};

}  // namespace ringcomm
