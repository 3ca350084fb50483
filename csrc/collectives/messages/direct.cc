#include "collectives/messages/direct.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/collective.h"
#include "collectives/messages/exchange.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// Staging for the parts of all peers, which a reduction needs at the same time; larger ones are
// reduced in pieces.
std::size_t piece_elems(const MessageEngine& engine, std::size_t element_bytes) {
  return engine.cut().num_slots * engine.cut().slot_bytes / element_bytes;
}

// The parts of all ranks for one reduction, in rank order; this rank's part is not copied.
class Parts {
 public:
  Parts(MessageEngine& engine, std::size_t max_bytes)
      : engine_(engine), sources_(static_cast<std::size_t>(engine.world_size())) {
    for (int peer = 0; peer < engine.world_size(); ++peer)
      if (peer != engine.rank()) sources_[static_cast<std::size_t>(peer)] = engine.stage(max_bytes);
  }

  std::byte* of(int peer) const { return sources_[static_cast<std::size_t>(peer)]; }
  void reduce(const ReduceOp& op, void* output, const std::byte* own, std::size_t num_elems,
              int divisor) const {
    std::vector<const void*> sources(sources_.begin(), sources_.end());
    sources[static_cast<std::size_t>(engine_.rank())] = own;
    if (num_elems > 0)
      op.combine(output, nullptr, sources.data(), engine_.world_size(), num_elems, divisor);
  }

 private:
  MessageEngine& engine_;
  std::vector<std::byte*> sources_;
};

template <class Body>
void for_each_peer(const MessageEngine& engine, const Body& body) {
  for (int distance = 1; distance < engine.world_size(); ++distance)
    body((engine.rank() + distance) % engine.world_size());
}

void keep_own(const void* input, void* output, std::size_t num_bytes) {
  if (num_bytes > 0 && input != output) std::memmove(output, input, num_bytes);
}

// The pieces of `num_elems`; at least one, because headers are exchanged even without data.
std::size_t num_pieces(std::size_t num_elems, std::size_t max_elems) {
  return std::max<std::size_t>(1, num_slices(num_elems, max_elems));
}

}  // namespace

std::uint64_t direct_all_reduce(MessageEngine& engine, const Collective& call,
                                const CallHeader& header) {
  const ReduceOp& op = reduce_op_of(call);
  const std::size_t max_elems =
      std::max<std::size_t>(1, std::min(call.num_elems, piece_elems(engine, op.element_bytes)));
  const Parts parts(engine, max_elems * op.element_bytes);
  MessageExchange exchange(engine, header);
  for (std::size_t idx = 0; idx < num_pieces(call.num_elems, max_elems); ++idx) {
    const ElemRange piece = slice_of({0, call.num_elems}, idx, max_elems);
    const std::byte* input = at(call.inputs[0], piece.begin_elems, op.element_bytes);
    const std::size_t num_bytes = piece.num_elems * op.element_bytes;
    for_each_peer(engine, [&](int peer) {
      exchange.recv(peer, parts.of(peer), num_bytes);
      exchange.send(peer, input, num_bytes);
    });
    exchange.finish();
    parts.reduce(op, at(call.outputs[0], piece.begin_elems, op.element_bytes), input,
                 piece.num_elems, divisor_of(call, engine.world_size()));
  }
  return static_cast<std::uint64_t>(engine.world_size() - 1) * call.num_bytes();
}

std::uint64_t direct_reduce_scatter(MessageEngine& engine, const CallHeader& header,
                                    const MessageShares& shares) {
  const int rank = engine.rank();
  const std::size_t max_elems = std::max<std::size_t>(
      1, std::min(shares.max_elems(), piece_elems(engine, shares.element_bytes)));
  const Parts parts(engine, max_elems * shares.element_bytes);
  MessageExchange exchange(engine, header);
  std::uint64_t sent_bytes = 0;
  for (std::size_t idx = 0; idx < num_pieces(shares.max_elems(), max_elems); ++idx) {
    const ElemRange own = shares.slice(rank, idx, max_elems);
    for_each_peer(engine, [&](int peer) {
      const ElemRange theirs = shares.slice(peer, idx, max_elems);
      exchange.recv(peer, parts.of(peer), own.num_elems * shares.element_bytes);
      exchange.send(peer, shares.input(peer, theirs), theirs.num_elems * shares.element_bytes);
      sent_bytes += theirs.num_elems * shares.element_bytes;
    });
    exchange.finish();
    parts.reduce(*shares.op, shares.output(rank, own), shares.input(rank, own), own.num_elems,
                 shares.divisor);
  }
  return sent_bytes;
}

std::uint64_t direct_all_gather(MessageEngine& engine, const CallHeader& header,
                                const MessageShares& shares) {
  MessageExchange exchange(engine, header);
  for_each_peer(engine, [&](int peer) {
    exchange.recv(peer, shares.of(peer).output, shares.num_bytes(peer));
    exchange.send(peer, shares.of(engine.rank()).output, shares.num_bytes(engine.rank()));
  });
  exchange.finish();
  return static_cast<std::uint64_t>(engine.world_size() - 1) * shares.num_bytes(engine.rank());
}

std::uint64_t direct_reduce(MessageEngine& engine, const Collective& call,
                            const CallHeader& header) {
  greet_neighbours(engine, header);
  const ReduceOp& op = reduce_op_of(call);
  const std::size_t max_elems = piece_elems(engine, op.element_bytes);
  MessageExchange exchange(engine, header);
  if (engine.rank() != call.root) {
    for (std::size_t idx = 0; idx < num_slices(call.num_elems, max_elems); ++idx) {
      const ElemRange piece = slice_of({0, call.num_elems}, idx, max_elems);
      exchange.send(call.root, at(call.inputs[0], piece.begin_elems, op.element_bytes),
                    piece.num_elems * op.element_bytes);
    }
    exchange.finish();
    return call.num_bytes();
  }
  const Parts parts(engine, std::min(max_elems, call.num_elems) * op.element_bytes);
  for (std::size_t idx = 0; idx < num_slices(call.num_elems, max_elems); ++idx) {
    const ElemRange piece = slice_of({0, call.num_elems}, idx, max_elems);
    for_each_peer(engine, [&](int peer) {
      exchange.recv(peer, parts.of(peer), piece.num_elems * op.element_bytes);
    });
    exchange.finish();
    parts.reduce(op, at(call.outputs[0], piece.begin_elems, op.element_bytes),
                 at(call.inputs[0], piece.begin_elems, op.element_bytes), piece.num_elems,
                 divisor_of(call, engine.world_size()));
  }
  return 0;
}

std::uint64_t direct_gather(MessageEngine& engine, const Collective& call,
                            const CallHeader& header) {
  greet_neighbours(engine, header);
  const std::size_t bytes = element_bytes(call.dtype);
  const std::size_t own_bytes = call.num_elems * bytes;
  MessageExchange exchange(engine, header);
  if (engine.rank() == call.root) {
    for_each_peer(engine, [&](int peer) {
      exchange.recv(peer, call.outputs[peer], call.output_share(peer) * bytes);
    });
    keep_own(call.inputs[0], call.outputs[engine.rank()], own_bytes);
  } else {
    exchange.send(call.root, call.inputs[0], own_bytes);
  }
  exchange.finish();
  return engine.rank() == call.root ? 0 : own_bytes;
}

std::uint64_t direct_scatter(MessageEngine& engine, const Collective& call,
                             const CallHeader& header) {
  greet_neighbours(engine, header);
  const std::size_t bytes = element_bytes(call.dtype);
  std::uint64_t sent_bytes = 0;
  MessageExchange exchange(engine, header);
  if (engine.rank() == call.root) {
    for_each_peer(engine, [&](int peer) {
      exchange.send(peer, call.inputs[peer], call.input_share(peer) * bytes);
      sent_bytes += call.input_share(peer) * bytes;
    });
    keep_own(call.inputs[engine.rank()], call.outputs[0], call.num_elems * bytes);
  } else {
    exchange.recv(call.root, call.outputs[0], call.num_elems * bytes);
  }
  exchange.finish();
  return sent_bytes;
}

std::uint64_t direct_all_to_all(MessageEngine& engine, const Collective& call,
                                const CallHeader& header) {
  const std::size_t bytes = element_bytes(call.dtype);
  const int rank = engine.rank();
  std::uint64_t sent_bytes = 0;
  MessageExchange exchange(engine, header);
  for_each_peer(engine, [&](int peer) { sent_bytes += exchange.swap_shares(call, peer); });
  exchange.finish();
  keep_own(call.inputs[rank], call.outputs[rank], call.input_share(rank) * bytes);
  return sent_bytes;
}

}  // namespace ringcomm
