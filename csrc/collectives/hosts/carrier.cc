#include "collectives/hosts/carrier.h"

#include <string>

#include "collectives/hosts/collective.h"
#include "collectives/messages/collectives.h"
#include "collectives/messages/p2p.h"
#include "collectives/shm/carrier.h"

namespace ringcomm {
namespace {

std::unique_ptr<Carrier> make_local(shm::Rendezvous& ranks, const PeerTable& peer_table,
                                    const CommunicatorOptions& options) {
  if (peer_table.num_ranks_on(peer_table.host_of(ranks.rank())) == 1) return nullptr;
  return std::make_unique<ShmCarrier>(ranks, peer_table, ranks.rank(), options);
}

}  // namespace

HostsCarrier::HostsCarrier(KeyValueStore& store, shm::Rendezvous& ranks,
                           const PeerTable& peer_table, const CommunicatorOptions& options,
                           const MakeMessages& make_messages, bool is_flat)
    : options_(options),
      peer_table_(peer_table),
      is_flat_(is_flat),
      members_(store, ranks),
      local_(members_.told_if_it_fails([&]() -> std::unique_ptr<Carrier> {
        return is_flat ? nullptr : make_local(ranks, peer_table, options);
      })),
      transport_(members_.told_if_it_fails([&] {
        // Before this rank leaves the memory of its host, where others may be in a call already.
        members_.on_abort([this] { tell_host(); });
        return make_messages([&ranks](int missing) {
          ranks.look(missing, "rank " + std::to_string(missing) + " did not connect to the others");
        });
      })),
      messages_(*transport_, {.num_slots = options.num_slots,
                              .slot_bytes = options.slot_bytes,
                              .is_rank_ordered = options.is_rank_ordered}) {
  members_.watch(*transport_);
}

void HostsCarrier::tell_host() {
  if (local_ != nullptr) local_->membership().abort(members_.abort_reason());
}

std::unique_ptr<PointToPoint> HostsCarrier::make_p2p(Failure& failure, Stats& stats) {
  return std::make_unique<MessageP2p>(*transport_, members_, failure, stats);
}

// Whether the hosts are ignored: left-to-right sums over the ranks cannot be computed host by host,
// and an algorithm that the user names works on ranks.
bool HostsCarrier::is_flat(const Collective& call) const {
  if (is_flat_) return true;
  if (!is_reduction(call.op)) return false;
  if (options_.is_rank_ordered) return true;
  return call.op == OpKind::kAllReduce &&
         (call.algorithm != Algorithm::kAuto || options_.algorithm != Algorithm::kAuto);
}

void HostsCarrier::plan(const Collective& call, CallHeader& header) const {
  if (is_flat(call))
    plan_message_collective(peer_table_.world_size(), call, options_, header);
  else
    header.algorithm = Algorithm::kHierarchical;
}

Traffic HostsCarrier::run(const Collective& call, const CallHeader& header,
                          const WaitLimits& limits) {
  members_.note_call(header.seq);
  MessageMembers::Operation operation(members_, deadline_after(limits.timeout));
  messages_.begin(operation);
  HostsCollective by_hosts(peer_table_, local_.get(), messages_, call, header, options_, limits);
  try {
    Traffic traffic{.algorithm = header.algorithm};
    if (is_flat_) {
      traffic.sent_bytes = run_message_collective(messages_, call, header);
    } else {
      by_hosts.run();
      traffic = by_hosts.traffic();
    }
    messages_.finish();
    return traffic;
  } catch (...) {
    // The store may not have it yet.
    if (by_hosts.has_heard_of_abort()) members_.abort(local_->membership().abort_reason());
    // Messages on their way would go on using the call's buffers, which end with it.
    transport_->abort();
    messages_.drop();
    throw;
  }
}

}  // namespace ringcomm
