#include <cstddef>

#include "bindings/device_messages/algorithms.h"
#include "bindings/device_messages/reduce.h"
#include "collectives/reduction.h"
#include "core/chunk_layout.h"

namespace ringcomm {
namespace {

// Sends the slices of a buffer along a chain of ranks. In turn k a rank receives slice k and sends
// slice k - lag, in one batch. It waits for an earlier turn of the next rank, and for a turn of the
// previous rank that depends only on this rank's earlier turns.
struct Chain {
  Chain(const DeviceEngine& engine, const Collective& call, std::size_t slice_bytes)
      : previous((engine.rank() + engine.world_size() - 1) % engine.world_size()),
        next((engine.rank() + 1) % engine.world_size()),
        element_bytes(ringcomm::element_bytes(call.dtype)),
        slice_elems(slice_bytes / element_bytes),
        all{0, call.num_elems},
        num_slices(ringcomm::num_slices(call.num_elems, slice_elems)) {}

  ElemRange slice(std::size_t idx) const { return slice_of(all, idx, slice_elems); }
  std::size_t offset(std::size_t idx) const { return slice(idx).begin_elems * element_bytes; }
  std::size_t num_bytes(std::size_t idx) const { return slice(idx).num_elems * element_bytes; }

  int previous;
  int next;
  std::size_t element_bytes;
  std::size_t slice_elems;
  ElemRange all;
  std::size_t num_slices;
};

}  // namespace

void device_chain_broadcast(DeviceEngine& engine, const Collective& call,
                            const CallHeader& header) {
  const Chain chain(engine, call, header.ring_slot_bytes);
  const bool is_root = engine.rank() == call.root;
  const bool has_next = chain.next != call.root;
  const auto* data = static_cast<const std::byte*>(is_root ? call.inputs[0] : call.outputs[0]);
  const std::size_t lag = is_root ? 0 : 1;
  for (std::size_t turn = 0; turn < chain.num_slices + lag; ++turn) {
    if (!is_root && turn < chain.num_slices)
      engine.recv(static_cast<std::byte*>(call.outputs[0]) + chain.offset(turn),
                  chain.num_bytes(turn), chain.previous);
    if (has_next && turn >= lag)
      engine.send(data + chain.offset(turn - lag), chain.num_bytes(turn - lag), chain.next);
    engine.post_and_wait();
  }
}

// Sums and received slices each have two slots: slice k - 1 is reduced while slice k and the sum of
// slice k - 2 are transferred.
void device_chain_reduce(DeviceEngine& engine, const Collective& call, const CallHeader& header) {
  const Chain chain(engine, call, header.ring_slot_bytes);
  const bool is_root = engine.rank() == call.root;
  const bool is_first = chain.previous == call.root;
  const DeviceReduceOp reduce(call.reduction, call.dtype, engine.device());
  const std::size_t slot_bytes = chain.slice_elems * chain.element_bytes;
  std::byte* received = is_first ? nullptr : engine.stage(2 * slot_bytes);
  std::byte* sums = is_first || is_root ? nullptr : engine.stage(2 * slot_bytes);
  const auto* input = static_cast<const std::byte*>(call.inputs[0]);
  constexpr std::size_t kLag = 2;
  in_pieces(
      engine, chain.num_slices + kLag,
      [&](std::size_t turn) {
        if (!is_first && turn < chain.num_slices)
          engine.recv(received + turn % 2 * slot_bytes, chain.num_bytes(turn), chain.previous);
        if (is_root || turn < kLag) return;
        const std::size_t idx = turn - kLag;
        engine.send(is_first ? input + chain.offset(idx) : sums + idx % 2 * slot_bytes,
                    chain.num_bytes(idx), chain.next);
      },
      [&](std::size_t turn) {
        if (is_first || turn >= chain.num_slices) return;
        std::byte* to = is_root ? static_cast<std::byte*>(call.outputs[0]) + chain.offset(turn)
                                : sums + turn % 2 * slot_bytes;
        reduce.combine(to, {received + turn % 2 * slot_bytes, input + chain.offset(turn)},
                       chain.slice(turn).num_elems,
                       is_root ? divisor_of(call, engine.world_size()) : 1);
      });
}

}  // namespace ringcomm
