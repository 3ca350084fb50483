#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/reducers.h"

// The kernels between two rendezvous. They read peers' buffers where they are, or in their scratch
// memory, write results there, and wait for nobody.

namespace ringcomm::cuda {

/// Threads that share work: those of some blocks of a grid.
struct Threads {
  std::uint32_t idx, num;

  template <Block B>
  RINGCOMM_HD static Threads of_grid(const B& block) {
    return {block.block_idx() * block.num_threads() + block.thread_idx(),
            block.num_blocks() * block.num_threads()};
  }
  /// Of blocks that are dealt to `num_parts`: those of the part that this block has.
  template <Block B>
  RINGCOMM_HD static Threads of_part(const B& block, unsigned num_parts) {
    const unsigned part = block.block_idx() % num_parts;
    const unsigned num_blocks = (block.num_blocks() - part + num_parts - 1) / num_parts;
    return {block.block_idx() / num_parts * block.num_threads() + block.thread_idx(),
            num_blocks * block.num_threads()};
  }
  RINGCOMM_HD std::uint32_t thread_idx() const { return idx; }
  RINGCOMM_HD std::uint32_t num_threads() const { return num; }
};

/// Calls body(begin, num) for parts of `total` elements, or bytes, that are counted in 32 bits.
template <class Body>
RINGCOMM_HD void for_spans(std::uint64_t total, const Body& body) {
  constexpr std::uint64_t kSpan = std::uint64_t{1} << 30;
  RINGCOMM_ROLLED
  for (std::uint64_t done = 0; done < total; done += kSpan) {
    const std::uint64_t left = total - done;
    body(done, static_cast<std::uint32_t>(left < kSpan ? left : kSpan));
  }
}

/// What of a part, in bytes, this launch has if some rank stages.
RINGCOMM_HD inline ElemRange piece_of(const KernelCall& call, std::uint64_t num_bytes,
                                      std::uint32_t unit) {
  const std::uint64_t begin = call.piece_begin * unit, size = call.piece_size * unit;
  if (begin >= num_bytes) return {num_bytes, 0};
  return {begin, num_bytes - begin < size ? num_bytes - begin : size};
}

/// What of `total` a launch does: all of it, or its piece.
RINGCOMM_HD inline ElemRange part_of(const KernelCall& call, const CallTable& table,
                                     std::uint64_t total) {
  if (table.is_whole == 0) return piece_of(call, total, 1);
  return {0, call.piece_begin == 0 ? total : 0};
}

/// Fills in the block's tables: each rank's input, and the outputs, this rank's first. Returns the
/// elements that this launch reduces: none after a failure, all in a group of one.
template <Block B>
RINGCOMM_HD ElemRange find_buffers(B& block, const KernelCall& call, std::size_t input_elem_bytes,
                                   std::size_t output_elem_bytes) {
  Tables& tables = block.tables();
  const CallTable& table = call.staging.table(call.rank);
  ElemRange elems = {0, 0};
  if (call.world_size == 1)
    elems.num_elems = call.num_elems;
  else if (table.is_open != 0)
    elems = part_of(call, table, call.num_elems);
  const auto world_size = static_cast<unsigned>(call.world_size);
  RINGCOMM_ROLLED
  for (unsigned i = block.thread_idx(); i < world_size; i += block.num_threads()) {
    const auto rank = static_cast<int>(i);
    tables.sources[i] =
        rank == call.rank ? call.inputs[i] + elems.begin_elems * input_elem_bytes : table.inputs[i];
    const int k = rank >= call.rank ? rank - call.rank : rank - call.rank + call.world_size;
    tables.outputs[k] = call.num_outputs > 1
                            ? table.outputs[i]
                            : call.outputs[call.rank] + elems.begin_elems * output_elem_bytes;
  }
  if (block.thread_idx() == 0) tables.num_outputs = static_cast<int>(call.num_outputs);
  block.sync();
  return elems;
}

/// Each owner reduces its elements from all inputs into its output, or into all ranks'.
template <class Reducer, Block B>
RINGCOMM_HD void reduce_in_place(B& block, const KernelCall& call) {
  const Reducer reducer(call.dtype, call.reduction);
  const std::size_t elem_bytes = reducer.elem_bytes();
  const ElemRange elems = find_buffers(block, call, elem_bytes, elem_bytes);
  for_spans(elems.num_elems, [&](std::uint64_t done, std::uint32_t num) {
    reducer.combine(Threads::of_grid(block), TableOutputs{block.tables(), done * elem_bytes},
                    TableSources{block.tables(), call.world_size, done * elem_bytes}, num,
                    call.divisor);
  });
}

template <class Threads>
RINGCOMM_HD void copy_long(const Threads& threads, std::byte* to, const std::byte* from,
                           std::uint64_t num_bytes) {
  for_spans(num_bytes, [&](std::uint64_t done, std::uint32_t num) {
    copy_by_threads<Cached::kNo, Cached::kNo>(threads, to + done, from + done, num);
  });
}

/// Copies what each rank has for this one. The blocks are dealt to the copies, those of peers after
/// this rank first.
template <Block B>
RINGCOMM_HD void move_in_place(B& block, const KernelCall& call) {
  const CallTable& table = call.staging.table(call.rank);
  if (table.is_open == 0) return;
  unsigned num_copies = 0;
  const auto has_data = [&](int rank) {
    return part_of(call, table, call.output_bytes[rank]).num_elems != 0;
  };
  RINGCOMM_ROLLED
  for (int rank = 0; rank < call.world_size; ++rank) num_copies += has_data(rank) ? 1 : 0;
  unsigned copy = 0;
  RINGCOMM_ROLLED
  for (int i = 1; i <= call.world_size; ++i) {
    const int rank = (call.rank + i) % call.world_size;
    if (!has_data(rank)) continue;
    // With fewer blocks than copies a block has several.
    const unsigned num_parts = num_copies < block.num_blocks() ? num_copies : block.num_blocks();
    if (copy++ % num_parts != block.block_idx() % num_parts) continue;
    const ElemRange bytes = part_of(call, table, call.output_bytes[rank]);
    std::byte* const to = call.outputs[rank] + bytes.begin_elems;
    const std::byte* const from =
        rank == call.rank ? call.inputs[rank] + bytes.begin_elems : table.inputs[rank];
    if (from != to) copy_long(Threads::of_part(block, num_parts), to, from, bytes.num_elems);
  }
}

/// Copies what peers read to the scratch memory: inputs, and the parameters that this rank updates.
/// Nothing after a failure: a late peer may still read what is there.
template <Block B>
RINGCOMM_HD void copy_in(B& block, const KernelCall& call) {
  if (call.staging.has_failed(call.rank)) return;
  const Threads threads = Threads::of_grid(block);
  const std::byte* last = nullptr;
  RINGCOMM_ROLLED
  for (int rank = 0; rank < call.world_size; ++rank) {
    const ElemRange bytes = piece_of(call, call.input_bytes[rank], call.input_unit);
    const std::byte* const from = call.inputs[rank] + bytes.begin_elems;
    if (!call.stages_inputs || rank == call.rank || from == last) continue;
    copy_long(threads, call.find(call.input_places[rank], call.rank), from, bytes.num_elems);
    if (bytes.num_elems > 0) last = from;  // all may have the same
  }
  if (!call.stages_outputs || !call.has_update) return;
  const ElemRange bytes = piece_of(call, call.output_bytes[call.rank], call.output_unit);
  copy_long(threads, call.find(call.output_places[call.rank], call.rank),
            call.outputs[call.rank] + bytes.begin_elems, bytes.num_elems);
}

/// Copies what peers have written from the scratch memory; nothing after a failure.
template <Block B>
RINGCOMM_HD void copy_out(B& block, const KernelCall& call) {
  if (call.staging.table(call.rank).is_open == 0) return;
  RINGCOMM_ROLLED
  for (int rank = 0; rank < call.world_size; ++rank) {
    const ElemRange bytes = piece_of(call, call.output_bytes[rank], call.output_unit);
    copy_long(Threads::of_grid(block), call.outputs[rank] + bytes.begin_elems,
              call.find(call.output_places[rank], call.rank), bytes.num_elems);
  }
}

/// Copies the messages that senders have announced: one after the other, each by all blocks.
template <Block B>
RINGCOMM_HD void copy_messages(B& block, const P2pCall& call) {
  RINGCOMM_ROLLED
  for (unsigned channel = 0; channel < call.num_channels; ++channel) {
    unsigned num_long = 0;
    RINGCOMM_ROLLED
    for (unsigned m = call.first_of_channel[channel]; m < call.first_of_channel[channel + 1]; ++m) {
      const P2pMessage& message = call.messages[m];
      if (message.is_send || !call.is_long(message)) continue;
      const std::byte* const from =
          call.staging.link_words(call.use, call.rank, message.peer).sources[num_long++];
      if (from != nullptr)
        copy_long(Threads::of_grid(block), message.data, from, message.num_bytes);
    }
  }
}

}  // namespace ringcomm::cuda
