#include "collectives/messages/collectives.h"

#include <stdexcept>
#include <string>

#include "collectives/messages/direct.h"
#include "collectives/messages/exchange.h"
#include "collectives/messages/ring.h"
#include "collectives/messages/shares.h"
#include "collectives/messages/trees.h"

namespace ringcomm {
namespace {

// The limits were measured over Gloo on one machine with two cores and other load
// (docs/design/messages.md); half and double of each differ by less than the noise.

// From this size of the whole call, bandwidth costs more than latency, so every link should be busy
// with its share.
constexpr std::size_t kRingMinBytes = std::size_t{1} << 20;

// all_reduce: with two ranks the ring has the same number of steps as two_shot, and overlaps them.
// With more ranks it has more steps, and if ranks share cores, each step waits for a core.
std::size_t all_reduce_ring_min_bytes(int world_size) {
  return world_size == 2 ? std::size_t{512} << 10 : std::size_t{4} << 20;
}

// Where one_shot ends: it sends N/2 times the bytes of two_shot, and saves one of its two steps.
std::size_t one_shot_max_bytes(int world_size) {
  return (std::size_t{512} << 10) / static_cast<std::size_t>(world_size);
}

// The bytes of the whole call; the same on every rank.
std::size_t total_bytes(const Collective& call, int world_size) {
  std::size_t elems = call.num_elems;
  const bool is_gathered = call.op == OpKind::kAllGather;
  if (is_gathered || call.op == OpKind::kReduceScatter) {
    elems = 0;
    for (int rank = 0; rank < world_size; ++rank)
      elems += is_gathered ? call.output_share(rank) : call.input_share(rank);
  }
  return elems * element_bytes(call.dtype);
}

Algorithm choose_all_reduce_of_messages(std::size_t num_bytes, int world_size,
                                        std::size_t limit_bytes) {
  if (num_bytes <= (limit_bytes != 0 ? limit_bytes : one_shot_max_bytes(world_size)))
    return Algorithm::kOneShot;
  return num_bytes < all_reduce_ring_min_bytes(world_size) ? Algorithm::kTwoShot : Algorithm::kRing;
}

std::uint64_t all_reduce(MessageEngine& engine, const Collective& call, const CallHeader& header) {
  if (header.algorithm == Algorithm::kOneShot) return direct_all_reduce(engine, call, header);
  const MessageShares shares = MessageShares::of_buffer(call, engine.world_size());
  const bool is_ring = header.algorithm == Algorithm::kRing;
  if (is_ring && !engine.cut().is_rank_ordered) {
    greet_neighbours(engine, header);
    return ring_all_reduce(engine, shares);
  }
  const std::uint64_t sent_bytes = direct_reduce_scatter(engine, header, shares);
  return sent_bytes +
         (is_ring ? ring_all_gather(engine, shares) : direct_all_gather(engine, header, shares));
}

std::uint64_t reduce_scatter(MessageEngine& engine, const Collective& call,
                             const CallHeader& header) {
  const MessageShares shares =
      MessageShares::of_reduce_scatter(call, engine.rank(), engine.world_size());
  if (header.algorithm != Algorithm::kRing) return direct_reduce_scatter(engine, header, shares);
  greet_neighbours(engine, header, shares.table());
  return ring_reduce_scatter(engine, shares);
}

std::uint64_t all_gather(MessageEngine& engine, const Collective& call, const CallHeader& header) {
  const MessageShares shares =
      MessageShares::of_all_gather(call, engine.rank(), engine.world_size());
  if (header.algorithm != Algorithm::kRing) return direct_all_gather(engine, header, shares);
  greet_neighbours(engine, header, shares.table());
  return ring_all_gather(engine, shares);
}

}  // namespace

void plan_message_collective(int world_size, const Collective& call,
                             const CommunicatorOptions& options, CallHeader& header) {
  const std::size_t num_bytes = total_bytes(call, world_size);
  const bool is_large = num_bytes >= kRingMinBytes;
  header.algorithm = Algorithm::kDirect;
  switch (call.op) {
    case OpKind::kAllReduce:
      header.algorithm = call.algorithm != Algorithm::kAuto ? call.algorithm : options.algorithm;
      if (header.algorithm == Algorithm::kAuto)
        header.algorithm =
            choose_all_reduce_of_messages(num_bytes, world_size, options.one_shot_max_bytes);
      break;
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
      if (is_large && !options.is_rank_ordered) header.algorithm = Algorithm::kRing;
      break;
    case OpKind::kAllGather:
    case OpKind::kBroadcast:
      // Between two ranks either form is the same message; in one piece it starts once.
      if (is_large && world_size > 2) header.algorithm = Algorithm::kRing;
      break;
    default:
      break;
  }
  if (header.algorithm == Algorithm::kRing) {
    const CommunicatorOptions cut = options.ring_options(call);
    header.ring_num_slots = cut.num_slots;
    header.ring_slot_bytes = cut.slot_bytes;
  }
}

std::uint64_t run_message_collective(MessageEngine& engine, const Collective& call,
                                     const CallHeader& header) {
  const bool is_ring = header.algorithm == Algorithm::kRing;
  switch (call.op) {
    case OpKind::kBarrier:
      tree_barrier(engine, header);
      return 0;
    case OpKind::kAllReduce:
      return all_reduce(engine, call, header);
    case OpKind::kReduce:
      return is_ring ? chain_reduce(engine, call, header) : direct_reduce(engine, call, header);
    case OpKind::kReduceScatter:
      return reduce_scatter(engine, call, header);
    case OpKind::kAllGather:
      return all_gather(engine, call, header);
    case OpKind::kBroadcast:
      return is_ring ? chain_broadcast(engine, call, header) : tree_broadcast(engine, call, header);
    case OpKind::kGather:
      return direct_gather(engine, call, header);
    case OpKind::kScatter:
      return direct_scatter(engine, call, header);
    case OpKind::kAllToAll:
      return direct_all_to_all(engine, call, header);
    default:
      break;
  }
  throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
}

}  // namespace ringcomm
