#include "collectives/messages/carrier.h"

#include "collectives/messages/collectives.h"
#include "collectives/messages/p2p.h"

namespace ringcomm {

MessageCarrier::MessageCarrier(KeyValueStore& store, shm::Rendezvous& ranks,
                               const CommunicatorOptions& options,
                               const MakeMessages& make_messages)
    : options_(options),
      members_(store, ranks),
      transport_(members_.told_if_it_fails([&] { return make_messages(look_for(ranks)); })),
      watch_(*transport_, members_),
      engine_(*transport_, {.is_rank_ordered = options.is_rank_ordered}) {
  members_.on_abort([this] { transport_->abort(); });
}

std::unique_ptr<PointToPoint> MessageCarrier::make_p2p(Failure& failure, Stats& stats) {
  return std::make_unique<MessageP2p>(*transport_, watch_, failure, stats);
}

void MessageCarrier::plan(const Collective& call, CallHeader& header) const {
  plan_message_collective(engine_.world_size(), call, options_, header);
}

Traffic MessageCarrier::run(const Collective& call, const CallHeader& header,
                            const WaitLimits& limits) {
  members_.note_call(header.seq);
  MessageWatch::Operation operation(watch_, deadline_after(limits.timeout));
  engine_.begin(operation);
  try {
    const std::uint64_t sent_bytes = run_message_collective(engine_, call, header);
    engine_.finish();
    return {.sent_bytes = sent_bytes, .algorithm = header.algorithm};
  } catch (...) {
    // Messages on their way would go on using the call's buffers, which end with it.
    transport_->abort();
    engine_.drop();
    throw;
  }
}

}  // namespace ringcomm
