#include "collectives/shm/carrier.h"

#include <stdexcept>
#include <string>

#include "collectives/shm/algorithm_choice.h"
#include "collectives/shm/algorithms.h"
#include "collectives/shm/p2p_engine.h"

namespace ringcomm {
namespace {

shm::SegmentConfig segment_config(const CommunicatorOptions& options) {
  shm::SegmentConfig config;
  config.ring_num_slots = options.num_slots;
  config.ring_slot_bytes = options.slot_bytes;
  return config;
}

// The size of the call for the choice of the kind of stores.
std::size_t size_class_bytes(const Collective& call, const CallHeader& header, int world_size) {
  if (!header.is_uneven) return call.num_bytes();
  std::size_t elems = 0;
  for (int rank = 0; rank < world_size; ++rank) elems += call.input_share(rank);
  return elems / static_cast<std::size_t>(world_size) * element_bytes(call.dtype);
}

}  // namespace

ShmCarrier::ShmCarrier(shm::Rendezvous& rendezvous, const PeerTable& peer_table, int rank,
                       const CommunicatorOptions& options)
    : options_(options),
      group_(rendezvous, peer_table.ranks_on(peer_table.host_of(rank)), segment_config(options)),
      scope_(group_),
      engine_(group_, scope_),
      direct_(engine_, options.algorithm) {}

std::size_t ShmCarrier::shared_bytes(int world_size, const CommunicatorOptions& options) {
  return shm::SegmentLayout(world_size, segment_config(options)).num_bytes();
}

std::unique_ptr<PointToPoint> ShmCarrier::make_p2p(Failure& failure, Stats& stats) {
  return std::make_unique<P2pEngine>(group_, failure, stats);
}

void ShmCarrier::plan(const Collective& call, CallHeader& header) const {
  header.algorithm = Algorithm::kDirect;
  const Algorithm asked = call.algorithm != Algorithm::kAuto ? call.algorithm : options_.algorithm;
  // The ring does not reduce in rank order; boards do.
  if (call.op == OpKind::kReduceUpdateGather && asked == Algorithm::kRing &&
      !options_.is_rank_ordered)
    header.algorithm = asked;
  if (call.op == OpKind::kAllReduce)
    header.algorithm =
        asked != Algorithm::kAuto
            ? asked
            : choose_all_reduce(call.num_bytes(), group_.world_size(), options_.one_shot_max_bytes);
  if (header.algorithm == Algorithm::kRing) {
    const CommunicatorOptions cut = options_.ring_options(call);
    header.ring_num_slots = cut.num_slots;
    header.ring_slot_bytes = cut.slot_bytes;
  }
}

Traffic ShmCarrier::run(const Collective& call, const CallHeader& header,
                        const WaitLimits& limits) {
  group_.note_call(header.seq);
  scope_.begin(limits);
  engine_.store_kinds().begin(call.op, size_class_bytes(call, header, group_.world_size()));
  engine_.take_copied_bytes();  // of a call that failed
  try {
    const std::uint64_t sent_bytes = dispatch_explained(call, header);
    if (!direct_.was_direct()) engine_.store_kinds().end();
    return {.sent_bytes = sent_bytes,
            .copied_bytes = engine_.take_copied_bytes(),
            .algorithm = direct_.was_direct() ? Algorithm::kDirect : header.algorithm};
  } catch (Stopped& stopped) {
    stopped.peer = scope_.awaited_peer();
    throw;
  }
}

std::uint64_t ShmCarrier::dispatch_explained(const Collective& call, const CallHeader& header) {
  try {
    return dispatch(call, header);
  } catch (const Mismatched& mismatched) {
    // The headers do not show the sizes of a peer whose shares are uneven.
    if (is_same_call(header, mismatched.theirs) && !header.is_uneven && mismatched.theirs.is_uneven)
      explain_mismatch(engine_, call, header);
    throw;
  }
}

std::uint64_t ShmCarrier::dispatch(const Collective& call, const CallHeader& header) {
  return direct_.run(call, header, [&] { return run_staged(call, header); });
}

std::uint64_t ShmCarrier::run_staged(const Collective& call, const CallHeader& header) {
  switch (call.op) {
    case OpKind::kBarrier:
      return barrier(engine_, header);
    case OpKind::kReduce:
      return reduce(engine_, call, header);
    case OpKind::kReduceScatter:
      return header.is_uneven ? reduce_scatter_uneven(engine_, call, header)
                              : reduce_scatter(engine_, call, header);
    case OpKind::kAllGather:
      return header.is_uneven ? all_gather_uneven(engine_, call, header)
                              : all_gather(engine_, call, header);
    case OpKind::kBroadcast:
      return broadcast(engine_, call, header);
    case OpKind::kGather:
      return gather(engine_, call, header);
    case OpKind::kScatter:
      return scatter(engine_, call, header);
    case OpKind::kAllToAll:
      return all_to_all(engine_, call, header);
    case OpKind::kAllReduce:
      switch (header.algorithm) {
        case Algorithm::kOneShot:
          return all_reduce_one_shot(engine_, call, header);
        case Algorithm::kRing:
          return options_.is_rank_ordered ? all_reduce_ring_ordered(engine_, call, header)
                                          : all_reduce_ring(engine_, call, header);
        case Algorithm::kTwoShot:
          return all_reduce_two_shot(engine_, call, header);
        case Algorithm::kAuto:
        case Algorithm::kDirect:
        case Algorithm::kHierarchical:
          break;
      }
      throw std::invalid_argument(std::string(name_of(header.algorithm)) +
                                  " is not an algorithm of all_reduce over shared memory");
    case OpKind::kReduceUpdateGather:
      return header.algorithm == Algorithm::kRing ? all_reduce_ring(engine_, call, header)
                                                  : reduce_update_gather(engine_, call, header);
    case OpKind::kSend:
    case OpKind::kRecv:
      break;
  }
  throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
}

}  // namespace ringcomm
