#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "bindings/device_messages/algorithms.h"
#include "bindings/device_messages/reduce.h"
#include "collectives/reduction.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// NCCL has hung on groups of several hundred messages, which it splits differently on different
// ranks (pytorch #174288). So a batch has at most this many distances, and both ends of a message
// are in the same batch.
constexpr int kMaxBatchDistances = 64;

// The ranks that a rank sends to and receives from at the same time.
struct Pair {
  int to;
  int from;
};

template <class Body>
void for_each_pair(const DeviceEngine& engine, const Body& body) {
  const int world_size = engine.world_size();
  for (int distance = 1; distance < world_size; ++distance)
    body(distance, Pair{.to = (engine.rank() + distance) % world_size,
                        .from = (engine.rank() + world_size - distance) % world_size});
}

// All pairs, in as few batches as possible.
template <class Body>
void exchange_all(DeviceEngine& engine, const Body& body) {
  for_each_pair(engine, [&](int distance, const Pair& pair) {
    body(pair);
    if (distance % kMaxBatchDistances == 0) engine.post_and_wait();
  });
  engine.post_and_wait();
}

// The maximum staging of a call that receives from all peers at the same time.
constexpr std::size_t kMaxStagingBytes = std::size_t{64} << 20;

// Elements of the pieces in which a part is sent, as both ends know.
std::size_t piece_elems_of(const DeviceEngine& engine, std::size_t element_bytes) {
  const std::size_t num_pieces = 2 * static_cast<std::size_t>(engine.world_size() - 1);
  const std::size_t piece_bytes =
      std::min(engine.cut().num_slots * engine.cut().slot_bytes, kMaxStagingBytes / num_pieces);
  return std::max<std::size_t>(1, piece_bytes / element_bytes);
}

// Staging for one piece of every peer's part, twice: one half is filled while the other is read.
class Parts {
 public:
  Parts(DeviceEngine& engine, const Collective& call, std::size_t most_elems)
      : engine_(engine),
        element_bytes_(element_bytes(call.dtype)),
        reduce_(call.reduction, call.dtype, engine.device()),
        piece_elems_(
            std::clamp<std::size_t>(most_elems, 1, piece_elems_of(engine, element_bytes_))) {
    const auto num_peers = static_cast<std::size_t>(engine.world_size()) - 1;
    half_bytes_ = num_peers * piece_elems_ * element_bytes_;
    if (most_elems > 0 && num_peers > 0) staging_ = engine.stage(2 * half_bytes_);
  }

  std::size_t piece_elems() const { return piece_elems_; }
  std::byte* of(int peer, std::size_t piece) const {
    const int place = peer < engine_.rank() ? peer : peer - 1;
    return staging_ + piece % 2 * half_bytes_ +
           static_cast<std::size_t>(place) * piece_elems_ * element_bytes_;
  }
  // Reduces left to right over the ranks; this rank's part is not copied.
  void reduce(void* to, const void* own, std::size_t piece, std::size_t num_elems,
              int divisor) const {
    std::vector<const void*> sources;
    for (int peer = 0; peer < engine_.world_size(); ++peer)
      sources.push_back(peer == engine_.rank() ? own : of(peer, piece));
    reduce_.combine(to, sources, num_elems, divisor);
  }

 private:
  DeviceEngine& engine_;
  std::size_t element_bytes_;
  DeviceReduceOp reduce_;
  std::size_t piece_elems_;
  std::size_t half_bytes_ = 0;
  std::byte* staging_ = nullptr;
};

}  // namespace

void device_one_shot_all_reduce(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  const Parts parts(engine, call, call.num_elems);
  const auto piece_at = [&](std::size_t piece) {
    return slice_of({0, call.num_elems}, piece, parts.piece_elems());
  };
  in_pieces(
      engine, num_slices(call.num_elems, parts.piece_elems()),
      [&](std::size_t piece) {
        const ElemRange elems = piece_at(piece);
        for_each_pair(engine, [&](int, const Pair& pair) {
          engine.send(at(call.inputs[0], elems.begin_elems, bytes), elems.num_elems * bytes,
                      pair.to);
          engine.recv(parts.of(pair.from, piece), elems.num_elems * bytes, pair.from);
        });
      },
      [&](std::size_t piece) {
        const ElemRange elems = piece_at(piece);
        parts.reduce(at(call.outputs[0], elems.begin_elems, bytes),
                     at(call.inputs[0], elems.begin_elems, bytes), piece, elems.num_elems,
                     divisor_of(call, engine.world_size()));
      });
}

void device_direct_reduce_scatter(DeviceEngine& engine, const Collective& call,
                                  const MessageShares& shares) {
  const int rank = engine.rank();
  const Parts parts(engine, call, shares.max_elems());
  in_pieces(
      engine, num_slices(shares.max_elems(), parts.piece_elems()),
      [&](std::size_t piece) {
        const ElemRange own = shares.slice(rank, piece, parts.piece_elems());
        for_each_pair(engine, [&](int, const Pair& pair) {
          const ElemRange theirs = shares.slice(pair.to, piece, parts.piece_elems());
          engine.send(shares.input(pair.to, theirs), theirs.num_elems * shares.element_bytes,
                      pair.to);
          engine.recv(parts.of(pair.from, piece), own.num_elems * shares.element_bytes, pair.from);
        });
      },
      [&](std::size_t piece) {
        const ElemRange own = shares.slice(rank, piece, parts.piece_elems());
        parts.reduce(shares.output(rank, own), shares.input(rank, own), piece, own.num_elems,
                     shares.divisor);
      });
}

void device_direct_all_gather(DeviceEngine& engine, const MessageShares& shares) {
  const int rank = engine.rank();
  exchange_all(engine, [&](const Pair& pair) {
    engine.send(shares.of(rank).output, shares.num_bytes(rank), pair.to);
    engine.recv(shares.of(pair.from).output, shares.num_bytes(pair.from), pair.from);
  });
}

void device_direct_reduce(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  if (engine.rank() != call.root) {
    // In the pieces in which the root receives.
    const std::size_t piece_elems = piece_elems_of(engine, bytes);
    for (std::size_t piece = 0; piece < num_slices(call.num_elems, piece_elems); ++piece) {
      const ElemRange elems = slice_of({0, call.num_elems}, piece, piece_elems);
      engine.send(at(call.inputs[0], elems.begin_elems, bytes), elems.num_elems * bytes, call.root);
      engine.post_and_wait();
    }
    return;
  }
  const Parts parts(engine, call, call.num_elems);
  const auto piece_at = [&](std::size_t piece) {
    return slice_of({0, call.num_elems}, piece, parts.piece_elems());
  };
  in_pieces(
      engine, num_slices(call.num_elems, parts.piece_elems()),
      [&](std::size_t piece) {
        for_each_pair(engine, [&](int, const Pair& pair) {
          engine.recv(parts.of(pair.from, piece), piece_at(piece).num_elems * bytes, pair.from);
        });
      },
      [&](std::size_t piece) {
        const ElemRange elems = piece_at(piece);
        parts.reduce(at(call.outputs[0], elems.begin_elems, bytes),
                     at(call.inputs[0], elems.begin_elems, bytes), piece, elems.num_elems,
                     divisor_of(call, engine.world_size()));
      });
}

void device_direct_broadcast(DeviceEngine& engine, const Collective& call) {
  exchange_all(engine, [&](const Pair& pair) {
    if (engine.rank() == call.root) engine.send(call.inputs[0], call.num_bytes(), pair.to);
    if (pair.from == call.root) engine.recv(call.outputs[0], call.num_bytes(), pair.from);
  });
}

void device_gather(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  const bool is_root = engine.rank() == call.root;
  exchange_all(engine, [&](const Pair& pair) {
    if (pair.to == call.root) engine.send(call.inputs[0], call.num_bytes(), pair.to);
    if (is_root)
      engine.recv(call.outputs[pair.from], call.output_share(pair.from) * bytes, pair.from);
  });
  if (is_root) engine.copy(call.outputs[engine.rank()], call.inputs[0], call.num_bytes());
}

void device_scatter(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  const bool is_root = engine.rank() == call.root;
  exchange_all(engine, [&](const Pair& pair) {
    if (is_root) engine.send(call.inputs[pair.to], call.input_share(pair.to) * bytes, pair.to);
    if (pair.from == call.root) engine.recv(call.outputs[0], call.num_bytes(), pair.from);
  });
  if (is_root) engine.copy(call.outputs[0], call.inputs[engine.rank()], call.num_bytes());
}

void device_all_to_all(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  const int rank = engine.rank();
  std::vector<const void*> inputs(call.inputs, call.inputs + engine.world_size());
  // Addresses from the first to the end of the last share.
  const auto span_of = [&](const void* const* shares, const auto& num_elems) {
    ElemRange span;
    std::size_t first = SIZE_MAX, end = 0;
    for (int peer = 0; peer < engine.world_size(); ++peer) {
      if (num_elems(peer) == 0) continue;
      const auto begin = reinterpret_cast<std::size_t>(shares[peer]);
      first = std::min(first, begin);
      end = std::max(end, begin + num_elems(peer) * bytes);
    }
    span = {first, end > first ? end - first : 0};
    return span;
  };
  const ElemRange sent = span_of(call.inputs, [&](int peer) { return call.input_share(peer); });
  const ElemRange got = span_of(const_cast<const void* const*>(call.outputs),
                                [&](int peer) { return call.output_share(peer); });
  if (sent.num_elems > 0 && got.num_elems > 0 && sent.begin_elems < got.end_elems() &&
      got.begin_elems < sent.end_elems()) {
    // If results overwrite the input, the input is sent from a copy.
    for (int peer = 0; peer < engine.world_size(); ++peer) {
      const std::size_t num_bytes = call.input_share(peer) * bytes;
      if (num_bytes == 0) continue;
      std::byte* copy = engine.stage(num_bytes);
      engine.copy(copy, inputs[static_cast<std::size_t>(peer)], num_bytes);
      inputs[static_cast<std::size_t>(peer)] = copy;
    }
  }
  exchange_all(engine, [&](const Pair& pair) {
    engine.send(inputs[static_cast<std::size_t>(pair.to)], call.input_share(pair.to) * bytes,
                pair.to);
    engine.recv(call.outputs[pair.from], call.output_share(pair.from) * bytes, pair.from);
  });
  engine.copy(call.outputs[rank], inputs[static_cast<std::size_t>(rank)],
              call.input_share(rank) * bytes);
}

void device_barrier(DeviceEngine& engine) {
  const int world_size = engine.world_size();
  std::byte* words = engine.stage(2);
  for (int distance = 1; distance < world_size; distance *= 2) {
    engine.send(words, 1, (engine.rank() + distance) % world_size);
    engine.recv(words + 1, 1, (engine.rank() + world_size - distance) % world_size);
    engine.post_and_wait();
  }
}

}  // namespace ringcomm
