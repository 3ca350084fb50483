#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "collectives/collective.h"
#include "core/chunk_layout.h"
#include "cuda/messages/algorithms.h"
#include "cuda/messages/reduce.h"

namespace ringcomm {
namespace {

using Batch = DeviceEngine::Batch;
using Part = DeviceEngine::Part;
using Parts = DeviceEngine::Parts;

Part part(const void* data, std::size_t num_bytes) { return {const_cast<void*>(data), num_bytes}; }

// Of all ranks but this one.
template <class PartOf>
Parts parts_of_peers(const DeviceEngine& engine, const PartOf& part_of) {
  Parts parts(static_cast<std::size_t>(engine.world_size()));
  for (int peer = 0; peer < engine.world_size(); ++peer)
    if (peer != engine.rank()) parts[static_cast<std::size_t>(peer)] = part_of(peer);
  return parts;
}

template <class SentTo, class ReceivedFrom>
Batch post_exchange(DeviceEngine& engine, const SentTo& sent_to,
                    const ReceivedFrom& received_from) {
  return engine.all_to_all(parts_of_peers(engine, sent_to), parts_of_peers(engine, received_from));
}

// The most that a call stages for its pieces.
constexpr std::size_t kMaxStagingBytes = std::size_t{64} << 20;
// Pieces begin at multiples of this, so that an aligned buffer is copied 16 bytes at a time.
constexpr std::size_t kElemsAlignment = 16;

// Reduces what all ranks send to this rank, in pieces: one is received while another is reduced.
class Pieces {
 public:
  // `most_elems`: the length of the longest part; the same on all ranks.
  Pieces(DeviceEngine& engine, const Collective& call, std::size_t most_elems)
      : engine_(engine),
        element_bytes_(element_bytes(call.dtype)),
        reduce_(call.reduction, call.dtype, engine.device()),
        num_elems_(most_elems) {
    const auto num_ranks = static_cast<std::size_t>(engine.world_size());
    const std::size_t piece_bytes = std::min(DeviceEngine::kNumSlots * DeviceEngine::kSlotBytes,
                                             kMaxStagingBytes / (2 * num_ranks));
    const std::size_t most = std::min(num_elems_, piece_bytes / element_bytes_);
    piece_elems_ = std::max<std::size_t>(1, num_slices(most, kElemsAlignment)) * kElemsAlignment;
    half_bytes_ = num_ranks * piece_elems_ * element_bytes_;
    if (num_elems_ > 0) staging_ = engine.stage(2 * half_bytes_);
  }

  std::size_t piece_elems() const { return piece_elems_; }

  // Where a piece from a rank is received, `stride_elems` behind that of the rank before.
  std::byte* of(int peer, std::size_t piece, std::size_t stride_elems) const {
    return staging_ + piece % 2 * half_bytes_ +
           static_cast<std::size_t>(peer) * stride_elems * element_bytes_;
  }

  // Left to right over the ranks. This rank's own piece is read where it is.
  void reduce(void* to, const void* own, std::size_t piece, std::size_t stride_elems,
              std::size_t num_elems, int divisor) const {
    std::vector<const void*> sources;
    for (int peer = 0; peer < engine_.world_size(); ++peer)
      sources.push_back(peer == engine_.rank() ? own : of(peer, piece, stride_elems));
    reduce_.combine(to, sources, num_elems, divisor);
  }

  // post(k) for all pieces in order, each followed by reduce(k) once it is there. Piece k + 1 is
  // posted before piece k is reduced.
  template <class Post, class Reduce>
  void run(const Post& post, const Reduce& reduce) {
    const std::size_t num_pieces = num_slices(num_elems_, piece_elems_);
    Batch batches[2];
    for (std::size_t next = 0; next <= num_pieces; ++next) {
      if (next < num_pieces) batches[next % 2] = post(next);
      if (next == 0) continue;
      engine_.wait(batches[(next - 1) % 2]);
      reduce(next - 1);
    }
  }

 private:
  DeviceEngine& engine_;
  std::size_t element_bytes_;
  DeviceReduceOp reduce_;
  std::size_t num_elems_;
  std::size_t piece_elems_;
  std::size_t half_bytes_;
  std::byte* staging_ = nullptr;
};

// The addresses from the first to the last byte of any part.
std::pair<std::uintptr_t, std::uintptr_t> span_of(const Parts& parts) {
  std::uintptr_t first = UINTPTR_MAX, end = 0;
  for (const Part& each : parts) {
    if (each.num_bytes == 0) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(each.data);
    first = std::min(first, begin);
    end = std::max(end, begin + each.num_bytes);
  }
  return {first, end};
}

bool may_overlap(const Parts& a, const Parts& b) {
  const auto [begin_a, end_a] = span_of(a);
  const auto [begin_b, end_b] = span_of(b);
  return begin_a < end_b && begin_b < end_a;
}

}  // namespace

void device_one_shot_all_reduce(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  Pieces pieces(engine, call, call.num_elems);
  const auto elems_of = [&](std::size_t piece) {
    return slice_of({0, call.num_elems}, piece, pieces.piece_elems());
  };
  pieces.run(
      [&](std::size_t piece) {
        const ElemRange elems = elems_of(piece);
        return engine.all_gather(at(call.inputs[0], elems.begin_elems, bytes),
                                 elems.num_elems * bytes, pieces.of(0, piece, elems.num_elems));
      },
      [&](std::size_t piece) {
        const ElemRange elems = elems_of(piece);
        pieces.reduce(at(call.outputs[0], elems.begin_elems, bytes),
                      at(call.inputs[0], elems.begin_elems, bytes), piece, elems.num_elems,
                      elems.num_elems, divisor_of(call, engine.world_size()));
      });
}

void device_reduce_scatter(DeviceEngine& engine, const Collective& call,
                           const MessageShares& shares) {
  const int rank = engine.rank();
  const std::size_t bytes = shares.element_bytes;
  Pieces pieces(engine, call, shares.max_elems());
  const auto slice = [&](int of, std::size_t piece) {
    return shares.slice(of, piece, pieces.piece_elems());
  };
  pieces.run(
      [&](std::size_t piece) {
        const std::size_t own_elems = slice(rank, piece).num_elems;
        return post_exchange(
            engine,
            [&](int peer) {
              const ElemRange theirs = slice(peer, piece);
              return part(shares.input(peer, theirs), theirs.num_elems * bytes);
            },
            [&](int peer) {
              return part(pieces.of(peer, piece, pieces.piece_elems()), own_elems * bytes);
            });
      },
      [&](std::size_t piece) {
        const ElemRange own = slice(rank, piece);
        pieces.reduce(shares.output(rank, own), shares.input(rank, own), piece,
                      pieces.piece_elems(), own.num_elems, shares.divisor);
      });
}

// The backend's own all_gather needs one buffer for all outputs, which some ranks may not have.
void device_all_gather(DeviceEngine& engine, const MessageShares& shares) {
  const auto of = [&](int rank) { return part(shares.of(rank).output, shares.num_bytes(rank)); };
  engine.wait(post_exchange(engine, [&](int) { return of(engine.rank()); }, of));
}

void device_broadcast(DeviceEngine& engine, const Collective& call) {
  const bool is_root = engine.rank() == call.root;
  const Part all = part(is_root ? call.inputs[0] : call.outputs[0], call.num_bytes());
  engine.wait(engine.broadcast(all.data, all.num_bytes, call.root));
}

// Messages, as NCCL's own gather is: parts of no bytes in an all_to_all are messages, too.
void device_gather(DeviceEngine& engine, const Collective& call) {
  if (engine.rank() != call.root) {
    engine.send(call.inputs[0], call.num_bytes(), call.root);
    return engine.post_and_wait();
  }
  for (int peer = 0; peer < engine.world_size(); ++peer)
    if (peer != call.root)
      engine.recv(call.outputs[peer], call.output_share(peer) * element_bytes(call.dtype), peer);
  engine.post_and_wait();
  engine.copy(call.outputs[call.root], call.inputs[0], call.num_bytes());
}

void device_scatter(DeviceEngine& engine, const Collective& call) {
  if (engine.rank() != call.root) {
    engine.recv(call.outputs[0], call.num_bytes(), call.root);
    return engine.post_and_wait();
  }
  for (int peer = 0; peer < engine.world_size(); ++peer)
    if (peer != call.root)
      engine.send(call.inputs[peer], call.input_share(peer) * element_bytes(call.dtype), peer);
  engine.post_and_wait();
  engine.copy(call.outputs[0], call.inputs[call.root], call.num_bytes());
}

void device_all_to_all(DeviceEngine& engine, const Collective& call) {
  const std::size_t bytes = element_bytes(call.dtype);
  Parts inputs, outputs;
  for (int peer = 0; peer < engine.world_size(); ++peer) {
    inputs.push_back(part(call.inputs[peer], call.input_share(peer) * bytes));
    outputs.push_back(part(call.outputs[peer], call.output_share(peer) * bytes));
  }
  if (may_overlap(inputs, outputs)) {
    for (Part& input : inputs) {
      std::byte* copy = engine.stage(input.num_bytes);
      engine.copy(copy, input.data, input.num_bytes);
      input.data = copy;
    }
  }
  const auto own = static_cast<std::size_t>(engine.rank());
  engine.copy(outputs[own].data, inputs[own].data, inputs[own].num_bytes);
  inputs[own] = outputs[own] = {};
  engine.wait(engine.all_to_all(inputs, outputs));
}

void device_barrier(DeviceEngine& engine) {
  const auto world_size = static_cast<std::size_t>(engine.world_size());
  std::byte* bytes = engine.stage(world_size);
  engine.wait(engine.all_gather(bytes + engine.rank(), 1, bytes));
}

}  // namespace ringcomm
