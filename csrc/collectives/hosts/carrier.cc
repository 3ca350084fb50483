#include "collectives/hosts/carrier.h"

#include <stdexcept>
#include <string>

#include "collectives/hosts/agreement.h"
#include "collectives/hosts/rooted.h"
#include "collectives/hosts/shares.h"
#include "collectives/messages/collectives.h"
#include "collectives/messages/p2p.h"
#include "collectives/shm/carrier.h"

namespace ringcomm {
namespace {

// Up to here one message step between leaders beats two in which every rank has its part, with two
// hosts (0.9 to 7 ms against 12 at 1 MiB, and still 24 against 29 at 16 MiB, over Gloo on one busy
// machine). It sends H/2 times the bytes, all of them by one rank: less where hosts are more.
std::size_t leader_max_bytes(int num_hosts) {
  return (std::size_t{2} << 20) / static_cast<std::size_t>(num_hosts);
}

MessageEngine::Cut cut_of(const CommunicatorOptions& options) {
  return {.slot_bytes = 256 << 10, .is_rank_ordered = options.is_rank_ordered};
}

std::unique_ptr<Carrier> make_local(shm::Rendezvous& ranks, const PeerTable& peer_table,
                                    const CommunicatorOptions& options) {
  if (peer_table.num_ranks_on(peer_table.host_of(ranks.rank())) == 1) return nullptr;
  return std::make_unique<ShmCarrier>(ranks, peer_table, ranks.rank(), options);
}

}  // namespace

HostsCarrier::HostsCarrier(KeyValueStore& store, shm::Rendezvous& ranks,
                           const PeerTable& peer_table, const CommunicatorOptions& options,
                           const MakeMessages& make_messages)
    : options_(options),
      peer_table_(peer_table),
      members_(store, ranks),
      local_(members_.told_if_it_fails([&] { return make_local(ranks, peer_table, options); })),
      transport_(members_.told_if_it_fails([&] {
        // Before this rank leaves the memory of its host, where others may be in a call already.
        members_.on_abort([this] { tell_host(); });
        return make_messages(look_for(ranks));
      })),
      watch_(*transport_, members_),
      planner_(*transport_, cut_of(options)),
      engine_(peer_table_, ranks.rank(), local_.get(), *transport_, cut_of(options)) {
  members_.on_abort([this] {
    tell_host();
    transport_->abort();
  });
}

void HostsCarrier::tell_host() {
  if (local_ != nullptr) local_->membership().abort(members_.abort_reason());
}

std::unique_ptr<PointToPoint> HostsCarrier::make_p2p(Failure& failure, Stats& stats) {
  return std::make_unique<MessageP2p>(*transport_, watch_, failure, stats);
}

// Whether the hosts are ignored: left-to-right sums over the ranks cannot be computed host by host,
// and an algorithm that the user names works on ranks.
bool HostsCarrier::is_flat(const Collective& call) const {
  if (!is_reduction(call.op)) return false;
  if (options_.is_rank_ordered) return true;
  return call.op == OpKind::kAllReduce &&
         (call.algorithm != Algorithm::kAuto || options_.algorithm != Algorithm::kAuto);
}

void HostsCarrier::plan(const Collective& call, CallHeader& header) const {
  if (is_flat(call))
    plan_message_collective(planner_.world_size(), call, options_, header);
  else
    header.algorithm = Algorithm::kHierarchical;
}

Traffic HostsCarrier::run(const Collective& call, const CallHeader& header,
                          const WaitLimits& limits) {
  members_.note_call(header.seq);
  MessageWatch::Operation operation(watch_, deadline_after(limits.timeout));
  engine_.begin(operation, header, limits);
  try {
    agree_inside_host(engine_, call, header);
    dispatch(call, header);
    engine_.finish();
    return engine_.traffic();
  } catch (...) {
    // The store may not have it yet.
    if (engine_.has_heard_of_abort()) members_.abort(local_->membership().abort_reason());
    // Messages on their way would go on using the call's buffers, which end with it.
    transport_->abort();
    engine_.drop();
    throw;
  }
}

void HostsCarrier::dispatch(const Collective& call, const CallHeader& header) {
  if (is_flat(call)) {
    hosts_barrier(engine_, header);
    engine_.count_sent(run_message_collective(engine_.all(), call, header));
    return;
  }
  const int rank = engine_.rank();
  const int world_size = engine_.world_size();
  switch (call.op) {
    case OpKind::kBarrier:
      return hosts_barrier(engine_, header);
    case OpKind::kAllReduce: {
      if (call.num_bytes() <= leader_max_bytes(peer_table_.num_hosts()))
        return hosts_leader_all_reduce(engine_, call, header);
      const MessageShares shares = MessageShares::of_buffer(call, world_size);
      HostsGreeting greeting(engine_, header);
      hosts_reduce_scatter(engine_, header, shares, greeting);
      return hosts_all_gather(engine_, header, shares, greeting);
    }
    case OpKind::kReduceScatter: {
      HostsGreeting greeting(engine_, header);
      return hosts_reduce_scatter(
          engine_, header, MessageShares::of_reduce_scatter(call, rank, world_size), greeting);
    }
    case OpKind::kAllGather: {
      HostsGreeting greeting(engine_, header);
      return hosts_all_gather(engine_, header, MessageShares::of_all_gather(call, rank, world_size),
                              greeting);
    }
    case OpKind::kAllToAll:
      return hosts_all_to_all(engine_, call, header);
    case OpKind::kReduce:
      return hosts_reduce(engine_, call, header);
    case OpKind::kBroadcast:
      return hosts_broadcast(engine_, call, header, options_);
    case OpKind::kGather:
      return hosts_gather(engine_, call, header);
    case OpKind::kScatter:
      return hosts_scatter(engine_, call, header);
    default:
      throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
  }
}

}  // namespace ringcomm
