#include "collectives/messages/collectives.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "collectives/messages/ring.h"
#include "collectives/collective.h"
#include "core/chunk_layout.h"

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

// Calls body(to, from) for all peers: data goes to the next ranks first, and comes from the
// previous.
template <class Body>
void for_each_distance(const MessageEngine& engine, const Body& body) {
  const int world_size = engine.world_size();
  for (int distance = 1; distance < world_size; ++distance)
    body((engine.rank() + distance) % world_size,
         (engine.rank() + world_size - distance) % world_size);
}

std::uint64_t move_directly(MessageEngine& engine, const Collective& call,
                            const CallHeader& header) {
  if (call.root >= 0) greet_neighbours(engine, header);
  std::uint64_t sent_bytes = 0;
  MessageExchange exchange(engine, header);
  for_each_distance(engine, [&](int to, int) { sent_bytes += exchange.send_part(call, to); });
  for_each_distance(engine, [&](int, int from) { exchange.recv_part(call, from); });
  exchange.finish();
  const auto given = part_given(call, engine.rank(), engine.rank());
  const auto taken = part_taken(call, engine.rank(), engine.rank());
  if (given && taken && given->num_elems > 0 && given->data != taken->data)
    std::memmove(taken->data, given->data, given->num_elems * element_bytes(call.dtype));
  return sent_bytes;
}

// Down a binomial tree.
std::uint64_t tree_broadcast(MessageEngine& engine, const Collective& call,
                             const CallHeader& header) {
  greet_neighbours(engine, header);
  const int world_size = engine.world_size();
  const int place = (engine.rank() - call.root + world_size) % world_size;  // the root's is 0
  const auto rank_at = [&](int other) { return (other + call.root) % world_size; };
  const void* data = place == 0 ? call.inputs[0] : call.outputs[0];
  MessageExchange exchange(engine, header);
  int bit = 1;
  for (; bit < world_size && (place & bit) == 0; bit <<= 1) {
  }
  if (place != 0) {
    exchange.recv(rank_at(place - bit), call.outputs[0], call.num_bytes());
    exchange.finish();
  }
  std::uint64_t sent_bytes = 0;
  for (bit >>= 1; bit > 0; bit >>= 1) {
    if (place + bit >= world_size) continue;
    exchange.send(rank_at(place + bit), data, call.num_bytes());
    sent_bytes += call.num_bytes();
  }
  exchange.finish();
  return sent_bytes;
}

// A large broadcast or reduce, in slices along the chain of ranks: from the root to the rank before
// it, or from the rank after the root to the root. Each rank passes a slice on; in a reduce it adds
// its part, with one rounding per hop, receives into one slot, and sums and sends from another.
//
// A sum's slot is free again when the next rank has posted its receive, which only waits for that
// rank's later slots. So no rank waits in a circle.
std::uint64_t run_chain(MessageEngine& engine, const Collective& call, const CallHeader& header) {
  greet_neighbours(engine, header);
  const int world_size = engine.world_size();
  const int next = (engine.rank() + 1) % world_size;
  const int previous = (engine.rank() + world_size - 1) % world_size;
  const bool reduces = call.op == OpKind::kReduce;
  const bool is_first = reduces ? previous == call.root : engine.rank() == call.root;
  const bool is_last = reduces ? engine.rank() == call.root : next == call.root;
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t num_slots = engine.cut().num_slots;
  const std::size_t slice_elems = engine.cut().slot_bytes / bytes;
  const std::size_t num_slices = ringcomm::num_slices(call.num_elems, slice_elems);
  const std::size_t slots_bytes = num_slots * slice_elems * bytes;
  std::byte* received_slots = reduces && !is_first ? engine.stage(slots_bytes) : nullptr;
  std::byte* sum_slots = reduces && !is_first && !is_last ? engine.stage(slots_bytes) : nullptr;
  const auto slice_at = [&](std::size_t idx) {
    return slice_of({0, call.num_elems}, idx, slice_elems);
  };
  const auto place_in = [&](std::byte* slots, std::size_t idx) {
    return slots != nullptr ? slots + idx % num_slots * slice_elems * bytes
                            : at(call.outputs[0], slice_at(idx).begin_elems, bytes);
  };
  std::vector<std::optional<MessageEngine::Handle>> receives(num_slots), sends(num_slots);
  std::size_t num_posted = 0;
  for (std::size_t idx = 0; idx < num_slices; ++idx) {
    const ElemRange slice = slice_at(idx);
    if (auto& send = sends[idx % num_slots]) engine.wait(*std::exchange(send, std::nullopt));
    const std::byte* data = nullptr;
    if (is_first || reduces) data = at(call.inputs[0], slice.begin_elems, bytes);
    if (!is_first) {
      for (; num_posted < std::min(idx + num_slots, num_slices); ++num_posted)
        receives[num_posted % num_slots] =
            engine.irecv(previous, MessageTags::kChain, place_in(received_slots, num_posted),
                         slice_at(num_posted).num_elems * bytes);
      engine.wait(*receives[idx % num_slots]);
      const void* sources[] = {place_in(received_slots, idx), data};
      data = place_in(sum_slots, idx);
      if (reduces)
        reduce_op_of(call).combine(place_in(sum_slots, idx), nullptr, sources, 2, slice.num_elems,
                                   is_last ? divisor_of(call, world_size) : 1);
    }
    if (sum_slots != nullptr)
      sends[idx % num_slots] =
          engine.isend(next, MessageTags::kChain, data, slice.num_elems * bytes);
    else if (!is_last)
      engine.post_send(next, MessageTags::kChain, data, slice.num_elems * bytes);
  }
  for (const auto& send : sends)
    if (send) engine.wait(*send);
  return is_last ? 0 : call.num_bytes();
}

// By dissemination: in step s a rank receives from the rank 2^s before it.
std::uint64_t barrier(MessageEngine& engine, const CallHeader& header) {
  const int world_size = engine.world_size();
  MessageExchange exchange(engine, header);
  for (int distance = 1; distance < world_size; distance *= 2) {
    exchange.recv((engine.rank() + world_size - distance) % world_size, nullptr, 0);
    exchange.send((engine.rank() + distance) % world_size, nullptr, 0);
    exchange.finish();
  }
  return 0;
}

std::uint64_t all_gather_directly(MessageEngine& engine, const CallHeader& header,
                                  const MessageShares& shares) {
  const std::size_t own_bytes = shares.num_bytes(engine.rank());
  MessageExchange exchange(engine, header);
  for_each_distance(engine, [&](int to, int from) {
    exchange.recv(from, shares.of(from).output, shares.num_bytes(from));
    exchange.send(to, shares.of(engine.rank()).output, own_bytes);
  });
  exchange.finish();
  return static_cast<std::uint64_t>(engine.world_size() - 1) * own_bytes;
}

std::uint64_t all_reduce(MessageEngine& engine, const Collective& call, const CallHeader& header) {
  if (header.algorithm == Algorithm::kOneShot)
    return reduce_directly(engine, header,
                           MessageShares::of_whole(call, engine.rank(), engine.world_size()));
  const MessageShares shares = MessageShares::of_buffer(call, engine.world_size());
  const bool is_ring = header.algorithm == Algorithm::kRing;
  if (is_ring && !engine.cut().is_rank_ordered) {
    greet_neighbours(engine, header);
    return ring_all_reduce(engine, shares);
  }
  const std::uint64_t sent_bytes = reduce_directly(engine, header, shares);
  return sent_bytes +
         (is_ring ? ring_all_gather(engine, shares) : all_gather_directly(engine, header, shares));
}

std::uint64_t reduce(MessageEngine& engine, const Collective& call, const CallHeader& header) {
  if (header.algorithm == Algorithm::kRing) return run_chain(engine, call, header);
  greet_neighbours(engine, header);
  return reduce_directly(
      engine, header, MessageShares::of_whole(call, engine.rank(), engine.world_size()), call.root);
}

// A reduce_scatter or all_gather.
std::uint64_t run_shares(MessageEngine& engine, const Collective& call, const CallHeader& header) {
  const bool reduces = call.op == OpKind::kReduceScatter;
  const auto shares_of = reduces ? MessageShares::of_reduce_scatter : MessageShares::of_all_gather;
  const MessageShares shares = shares_of(call, engine.rank(), engine.world_size());
  if (header.algorithm != Algorithm::kRing)
    return reduces ? reduce_directly(engine, header, shares)
                   : all_gather_directly(engine, header, shares);
  greet_neighbours(engine, header, shares.table());
  return reduces ? ring_reduce_scatter(engine, shares) : ring_all_gather(engine, shares);
}

}  // namespace

std::uint64_t reduce_directly(MessageEngine& engine, const CallHeader& header,
                              const MessageShares& shares, int root) {
  const int rank = engine.rank();
  const std::size_t bytes = shares.element_bytes;
  const bool receives = root < 0 || rank == root;
  const std::size_t num_staged = engine.num_staged();
  // Larger shares are reduced in pieces, because all ranks' parts are staged at the same time.
  const std::size_t max_elems =
      std::clamp<std::size_t>(engine.cut().num_slots * engine.cut().slot_bytes / bytes, 1,
                              std::max<std::size_t>(1, shares.max_elems()));
  std::vector<std::byte*> parts(static_cast<std::size_t>(engine.world_size()));
  const auto part = [&](int peer) -> std::byte*& { return parts[static_cast<std::size_t>(peer)]; };
  if (receives)
    for_each_distance(engine, [&](int peer, int) { part(peer) = engine.stage(max_elems * bytes); });
  std::uint64_t sent_bytes = 0;
  MessageExchange exchange(engine, header);
  // One piece at least, because headers are exchanged even without data.
  const std::size_t num_pieces =
      std::max<std::size_t>(1, num_slices(shares.max_elems(), max_elems));
  for (std::size_t idx = 0; idx < num_pieces; ++idx) {
    const ElemRange own = shares.slice(rank, idx, max_elems);
    for_each_distance(engine, [&](int to, int from) {
      if (receives) exchange.recv(from, part(from), own.num_elems * bytes);
      if (root >= 0 && to != root) return;
      const ElemRange theirs = shares.slice(to, idx, max_elems);
      exchange.send(to, shares.input(to, theirs), theirs.num_elems * bytes);
      sent_bytes += theirs.num_elems * bytes;
    });
    if (!receives) continue;
    exchange.finish();
    std::vector<const void*> sources(parts.begin(), parts.end());
    sources[static_cast<std::size_t>(rank)] = shares.input(rank, own);
    if (own.num_elems > 0)
      shares.op->combine(shares.output(rank, own), nullptr, sources.data(), engine.world_size(),
                         own.num_elems, shares.divisor);
  }
  exchange.finish();
  engine.unstage(num_staged);
  return sent_bytes;
}

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
}

std::uint64_t run_message_collective(MessageEngine& engine, const Collective& call,
                                     const CallHeader& header) {
  switch (call.op) {
    case OpKind::kBarrier:
      return barrier(engine, header);
    case OpKind::kAllReduce:
      return all_reduce(engine, call, header);
    case OpKind::kReduce:
      return reduce(engine, call, header);
    case OpKind::kReduceScatter:
    case OpKind::kAllGather:
      return run_shares(engine, call, header);
    case OpKind::kBroadcast:
      return header.algorithm == Algorithm::kRing ? run_chain(engine, call, header)
                                                  : tree_broadcast(engine, call, header);
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return move_directly(engine, call, header);
    default:
      break;
  }
  throw std::invalid_argument(std::string(name_of(call.op)) + " is not a collective");
}

}  // namespace ringcomm
