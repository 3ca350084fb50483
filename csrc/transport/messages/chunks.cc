#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/call.h"
#include "collectives/trace.h"
#include "core/chunk_layout.h"
#include "transport/messages/exchange.h"

namespace ringcomm {
namespace {

// all_reduce, reduce_scatter and all_gather, in which every rank owns a chunk.
class Chunks {
 public:
  explicit Chunks(HostsCall& call) : c_(call), hosts_(call.hosts) {
    const auto data = [&](const void* buffer, std::size_t elems = 0) {
      return const_cast<std::byte*>(at(buffer, elems, c_.element_bytes));
    };
    const ChunkLayout layout(c_.call.num_elems, c_.world_size);
    for (int rank = 0; rank < c_.world_size; ++rank) {
      const ElemRange part = layout.chunk(rank);
      chunks_.push_back(!gathers_ ? Chunk{data(c_.call.inputs[rank]),
                                          rank == c_.rank ? data(c_.call.outputs[0]) : nullptr,
                                          c_.call.input_shard(rank)}
                        : !reduces_
                            ? Chunk{data(c_.call.outputs[rank]), data(c_.call.outputs[rank]),
                                    c_.call.output_shard(rank)}
                            : Chunk{data(c_.call.inputs[0], part.begin_elems),
                                    data(c_.call.outputs[0], part.begin_elems), part.num_elems});
      max_elems_ = std::max(max_elems_, chunks_.back().num_elems);
    }
  }

  void run() {
    const Collective& call = c_.call;
    if (!reduces_ && call.num_elems > 0 && call.inputs[0] != call.outputs[c_.rank])
      std::memmove(call.outputs[c_.rank], call.inputs[0], c_.bytes(call.num_elems));
    if (c_.is_ring()) return ring();
    if (reduces_) reduce_scatter();
    if (gathers_) all_gather();
  }

 private:
  // The chunk of one rank in this rank's buffers. In an all_gather the own one is copied to its
  // output first.
  struct Chunk {
    const std::byte* input;
    std::byte* output;  // null if this rank has no room for it
    std::size_t num_elems;
  };
  const std::byte* input(int rank, const ElemRange& slice) const {
    return at(of(chunks_, rank).input, slice.begin_elems, c_.element_bytes);
  }
  std::byte* output(int rank, const ElemRange& slice) const {
    return at(of(chunks_, rank).output, slice.begin_elems, c_.element_bytes);
  }
  ElemRange slice(int rank, std::size_t slice_idx, std::size_t slice_elems) const {
    return slice_of({0, of(chunks_, rank).num_elems}, slice_idx, slice_elems);
  }

  // Leaves this rank's chunk, reduced over all ranks, in its output. The ranks of a host reduce
  // what they have for each rank, its rail peer sends that, and the owner adds up the hosts in
  // their order: one rounding inside a host, and one between them.
  void reduce_scatter() {
    const std::size_t max_elems = piece_elems(OpKind::kReduceScatter);
    // Two halves, each with room for what comes from each host, and what is sent in each round.
    const std::size_t num_sent = c_.local != nullptr ? hosts_.rounds.size() : 0;
    const std::size_t num_slots = num_sent + static_cast<std::size_t>(c_.num_hosts());
    std::byte* const staging = c_.exchange.stage(2 * num_slots * c_.bytes(max_elems));
    const auto slot = [&](std::size_t idx, std::size_t number) {
      return staging + (idx % 2 * num_slots + number) * c_.bytes(max_elems);
    };
    const auto received = [&](std::size_t idx, int host) {
      return slot(idx, num_sent + static_cast<std::size_t>(host));
    };
    const auto post = [&](std::size_t idx) {
      c_.exchange.finish_sends();
      for (const int host : hosts_.other_hosts)
        c_.recv(hosts_.rail_peer(c_.rank, host), received(idx, host),
                slice(c_.rank, idx, max_elems).num_elems);
      for (std::size_t round = 0; round < hosts_.rounds.size(); ++round) {
        const std::vector<int>& owners = hosts_.rounds[round];
        run_for(OpKind::kReduceScatter, owners, max_elems, idx, slot(idx, round));
        const int owner = of(owners, hosts_.local_rank);
        if (owner < 0) continue;
        const ElemRange part = slice(owner, idx, max_elems);
        c_.send(owner, c_.local != nullptr ? slot(idx, round) : input(owner, part), part.num_elems);
      }
    };
    const auto complete = [&](std::size_t idx) {
      const ElemRange own = slice(c_.rank, idx, max_elems);
      std::byte* result = output(c_.rank, own);
      run_for(OpKind::kReduceScatter, hosts_.local_ranks, max_elems, idx, result);
      c_.exchange.finish();
      if (own.num_elems == 0) return;
      std::vector<const void*> sources;
      for (int host = 0; host < c_.num_hosts(); ++host) sources.push_back(received(idx, host));
      of(sources, hosts_.host) = c_.local != nullptr ? result : input(c_.rank, own);
      reduce_op_of(c_.call).combine(result, nullptr, sources.data(), c_.num_hosts(), own.num_elems,
                                    divisor_of(c_.call, c_.world_size));
    };
    c_.in_pieces(1, num_steps_, num_pieces(max_elems), post, complete);
  }

  // Every rank's chunk is in its own output before, and in all ranks' after. A rank sends its chunk
  // to its rail peer on each other host, and the ranks there copy it.
  void all_gather() {
    const std::size_t max_elems = piece_elems(OpKind::kAllGather);
    const auto post = [&](std::size_t idx) {
      c_.exchange.finish_sends();
      const ElemRange own = slice(c_.rank, idx, max_elems);
      for (const auto& owners : hosts_.rounds) {
        const int owner = of(owners, hosts_.local_rank);
        if (owner < 0) continue;
        const ElemRange theirs = slice(owner, idx, max_elems);
        c_.recv(owner, output(owner, theirs), theirs.num_elems);
      }
      for (const int host : hosts_.other_hosts)
        c_.send(hosts_.rail_peer(c_.rank, host), output(c_.rank, own), own.num_elems);
      run_for(OpKind::kAllGather, hosts_.local_ranks, max_elems, idx, nullptr);
    };
    const auto complete = [&](std::size_t idx) {
      c_.exchange.finish();
      for (const auto& owners : hosts_.rounds)
        run_for(OpKind::kAllGather, owners, max_elems, idx, nullptr);
    };
    c_.in_pieces(num_steps_, num_steps_, num_pieces(max_elems), post, complete);
  }

  // Every rank receives from the previous rank and sends to the next one. In each of the N - 1
  // steps of the reduce-scatter it adds its own part of a slice to what it receives, and sends the
  // sum in the next step; in each step of the all-gather it keeps a complete slice and sends that.
  // Two slices take turns, so that one is reduced while the other one is received.
  //
  // No circle of waits: in a turn a rank waits for a message of that turn, and for its own of the
  // turn before the last one. Its neighbours post theirs when they have completed that turn.
  void ring() {
    const RingSchedule ring(c_.rank, c_.world_size);
    const int begin = reduces_ ? 0 : ring.num_steps();
    const int end = gathers_ ? 2 * ring.num_steps() : ring.num_steps();
    const auto num_steps = static_cast<std::size_t>(end - begin);
    const std::size_t max_elems = kSliceBytes / c_.element_bytes;
    const std::size_t slot_bytes = std::min(kSliceBytes, c_.bytes(max_elems_));
    std::byte* const slots = reduces_ ? c_.exchange.stage(kNumSlots * slot_bytes) : nullptr;
    const auto slot = [&](std::size_t idx) { return slots + idx % kNumSlots * slot_bytes; };
    // The last one of an odd number takes its turns alone.
    const std::size_t num_slices = num_pieces(max_elems);
    const auto slice_of_turn = [&](std::size_t idx) { return idx / 2 / num_steps * 2 + idx % 2; };
    const auto step_at = [&](std::size_t idx) {
      const auto step = static_cast<int>(idx / 2 % num_steps);
      c_.exchange.step() = {step + 1, end - begin, slice_of_turn(idx) + 1, num_slices};
      return begin + step;
    };
    // Of the chunk that is sent or received in a turn; the all-gather continues their sequence.
    const auto slice_at = [&](std::size_t idx, int chunk) {
      return slice(chunk, slice_of_turn(idx), max_elems);
    };
    // In a trace; `number` counts the steps of one half, and is 0 where the rank's own part is
    // sent.
    const auto record = [&](std::size_t idx, int number, int chunk, const ElemRange& part, int from,
                            int to) {
      return recorder::Span([&] {
        return recorder::Event{
            .num_bytes = c_.bytes(part.num_elems),
            .peer = recorder::rank16(to),
            .waits_for = recorder::rank16(from),
            .step = {number, ring.num_steps(), slice_of_turn(idx) + 1, num_slices},
            .chunk = recorder::rank16(chunk),
            .kind = recorder::Kind::kStep,
            .op = begin + static_cast<int>(idx / 2 % num_steps) < ring.num_steps()
                      ? OpKind::kReduceScatter
                      : OpKind::kAllGather};
      });
    };
    // The sum of what was received in a turn, which is sent two turns later.
    const auto sum_of = [&](std::size_t idx, int chunk, const ElemRange& part) {
      return of(chunks_, chunk).output != nullptr ? output(chunk, part) : slot(idx);
    };
    const auto post = [&](std::size_t idx) {
      if (slice_of_turn(idx) >= num_slices) return;
      const int step = step_at(idx);
      c_.exchange.finish_sends();
      const int sent = ring.reduce_scatter_send_chunk(step);
      const int received = ring.reduce_scatter_recv_chunk(step);
      const ElemRange in = slice_at(idx, received), out = slice_at(idx, sent);
      // In the first turn headers are exchanged even without data.
      if (in.num_elems > 0 || idx == 0)
        c_.recv(ring.previous(), step < ring.num_steps() ? slot(idx) : output(received, in),
                in.num_elems);
      const auto send = [&] {
        if (out.num_elems > 0 || idx == 0)
          c_.send(ring.next(), step == 0 ? input(sent, out) : sum_of(idx - 2, sent, out),
                  out.num_elems);
      };
      if (step > begin) return send();
      const recorder::Span recorded = record(idx, 0, sent, out, recorder::kNobody, ring.next());
      send();
    };
    const auto complete = [&](std::size_t idx) {
      if (slice_of_turn(idx) >= num_slices) {
        step_at(idx - 1);  // whose sends are waited for next
        return;
      }
      const int step = step_at(idx), received = ring.reduce_scatter_recv_chunk(step);
      const ElemRange in = slice_at(idx, received);
      const recorder::Span recorded =
          record(idx, step % ring.num_steps() + 1, received, in, ring.previous(),
                 step + 1 < end ? ring.next() : recorder::kNobody);
      c_.exchange.finish();
      if (step >= ring.num_steps() || in.num_elems == 0) return;
      const void* const sources[] = {slot(idx), input(received, in)};
      reduce_op_of(c_.call).combine(
          sum_of(idx, received, in), nullptr, sources, 2, in.num_elems,
          step + 1 == ring.num_steps() ? divisor_of(c_.call, c_.world_size) : 1);
    };
    c_.in_pieces(1, end - begin, (num_slices + 1) / 2 * 2 * num_steps, post, complete);
  }

  // The elements of a piece of all chunks. Two pieces are staged at the same time. Over messages
  // alone there is nothing to do in a host meanwhile, and an all_gather stages nothing.
  std::size_t piece_elems(OpKind op) const {
    const std::size_t most_elems = std::max<std::size_t>(1, max_elems_);
    if (hosts_.is_flat() && op == OpKind::kAllGather) return most_elems;
    return std::clamp<std::size_t>(
        kStagingBytes / (2 * static_cast<std::size_t>(c_.world_size) * c_.element_bytes), 1,
        most_elems);
  }
  // One at least, because headers are exchanged even without data.
  std::size_t num_pieces(std::size_t max_elems) const {
    return std::max<std::size_t>(1, num_slices(max_elems_, max_elems));
  }

  // A collective of piece `idx` of the owners' chunks, one for each rank of this host: each rank
  // reduces its owner's into `to`, or all copy all. The first piece compares calls also without
  // data.
  void run_for(OpKind op, const std::vector<int>& owners, std::size_t max_elems, std::size_t idx,
               std::byte* to) {
    if (c_.local == nullptr) return;
    const bool reduces = op == OpKind::kReduceScatter;
    std::vector<void*> parts;
    std::vector<std::size_t> elems;
    for (const int owner : owners) {
      const ElemRange part = owner < 0 ? ElemRange{} : slice(owner, idx, max_elems);
      parts.push_back(owner < 0 ? nullptr
                      : reduces ? const_cast<std::byte*>(input(owner, part))
                                : output(owner, part));
      elems.push_back(part.num_elems);
    }
    if (idx > 0 && std::ranges::all_of(elems, [](std::size_t n) { return n == 0; })) return;
    const void* input[] = {of(parts, hosts_.local_rank)};
    void* output[] = {to};
    c_.run_local({{.num_elems = of(elems, hosts_.local_rank),
                   .op = op,
                   .dtype = c_.call.dtype,
                   .reduction = undivided(c_.call.reduction)},
                  reduces ? parts.data() : input,
                  reduces ? output : parts.data(),
                  reduces ? elems.data() : nullptr,
                  reduces ? nullptr : elems.data()});
  }

  HostsCall& c_;
  const HostsView& hosts_;
  const bool reduces_ = c_.call.op != OpKind::kAllGather;
  const bool gathers_ = c_.call.op != OpKind::kReduceScatter;
  const int num_steps_ = reduces_ && gathers_ ? 2 : 1;
  std::vector<Chunk> chunks_;  // by rank
  std::size_t max_elems_ = 0;
};

}  // namespace

void run_by_chunks(HostsCall& call) { Chunks(call).run(); }

}  // namespace ringcomm
