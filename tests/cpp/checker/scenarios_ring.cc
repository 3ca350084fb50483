#include <memory>

#include "checker_arch.h"
#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// An all-reduce over a ring of links, in place, slice by slice.
struct Ring {
  int num_ranks;
  int num_slots;
  std::size_t num_elems;
  std::size_t slot_elems;

  std::vector<LinkGeometry> links;  ///< links[r] leads from rank r to the next
  std::vector<std::byte*> buffers;  ///< per rank

  void lay_out(Memory& memory) {
    links.clear();
    buffers.clear();
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int next = RingSchedule(rank, num_ranks).next();
      const std::string name = std::to_string(rank) + ">" + std::to_string(next);
      Cursor* cursors = memory.add_cursors(2, {"tail " + name, "head " + name});
      auto* link = reinterpret_cast<LinkCursors*>(cursors);
      const int slot_blocks = static_cast<int>(slot_elems);
      std::byte* slots = memory.add_shared(num_slots * slot_blocks, "slots " + name);
      memory.own_as_link(slots, num_slots, slot_blocks, link->tail, link->head, rank, next);
      links.push_back({&link->tail, &link->head, slots, static_cast<std::uint32_t>(num_slots),
                       slot_elems * kBlockBytes});
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      buffers.push_back(
          memory.add_private(rank, static_cast<int>(num_elems), "buffer " + std::to_string(rank)));
      for (std::size_t i = 0; i < num_elems; ++i) {
        memory.poke(buffers.back() + i * kBlockBytes, input_of(rank, i));
      }
    }
  }

  std::string check(const Memory& memory, int rank) const {
    for (std::size_t i = 0; i < num_elems; ++i) {
      std::uint64_t sum = 0;
      for (int other = 0; other < num_ranks; ++other) sum += input_of(other, i);
      const std::string fault = compare(memory, buffers[rank] + i * kBlockBytes, sum);
      if (!fault.empty()) return fault;
    }
    return {};
  }
};

/// One slice through both halves of the ring, in the primitives that the shipped ring uses.
WaitStatus ring_slice(CheckerArch& arch, SendLink<CheckerArch>& to, RecvLink<CheckerArch>& from,
                      const Ring& ring, int rank, std::size_t slice_idx) {
  const RingSchedule schedule(rank, ring.num_ranks);
  const ChunkLayout layout(ring.num_elems, ring.num_ranks);
  const int last = schedule.num_steps() - 1;
  std::uint64_t num_primitives = 100 * slice_idx;
  const auto part = [&](int chunk_idx, std::size_t& num_bytes) {
    const ElemRange range = slice_of(layout.chunk(chunk_idx), slice_idx, ring.slot_elems);
    num_bytes = range.num_elems * kBlockBytes;
    arch.checkpoint(num_primitives++);
    return ring.buffers[rank] + range.begin_elems * kBlockBytes;
  };
  const auto combine = [&](std::byte* out, std::byte* also, const std::byte* received,
                           const std::byte* local, std::size_t num_bytes) {
    arch.combine(out, also, received, local, num_bytes);
  };

  std::size_t num_bytes = 0;
  std::byte* data = part(schedule.reduce_scatter_send_chunk(0), num_bytes);
  if (const WaitStatus stop = send(arch, to, data, num_bytes); stop != WaitStatus::kNone)
    return stop;
  for (int step = 0; step < last; ++step) {
    data = part(schedule.reduce_scatter_recv_chunk(step), num_bytes);
    const WaitStatus stop = recv_reduce_send(from, to, nullptr, data, num_bytes, combine);
    if (stop != WaitStatus::kNone) return stop;
  }
  data = part(schedule.reduce_scatter_recv_chunk(last), num_bytes);
  if (const WaitStatus stop = recv_reduce_send(from, to, data, data, num_bytes, combine);
      stop != WaitStatus::kNone) {
    return stop;
  }
  for (int step = 0; step < last; ++step) {
    data = part(schedule.all_gather_recv_chunk(step), num_bytes);
    if (const WaitStatus stop = recv_copy_send(arch, from, to, data, num_bytes);
        stop != WaitStatus::kNone)
      return stop;
  }
  data = part(schedule.all_gather_recv_chunk(last), num_bytes);
  return recv(arch, from, data, num_bytes);
}

WaitStatus ring_all_reduce(CheckerArch& arch, const Ring& ring, int rank) {
  const RingSchedule schedule(rank, ring.num_ranks);
  const ChunkLayout layout(ring.num_elems, ring.num_ranks);
  SendLink<CheckerArch> to(arch, ring.links[rank], schedule.next());
  RecvLink<CheckerArch> from(arch, ring.links[schedule.previous()], schedule.previous());
  const std::size_t count = num_slices(layout.max_chunk_elems(), ring.slot_elems);
  for (std::size_t slice_idx = 0; slice_idx < count; ++slice_idx) {
    const WaitStatus stop = ring_slice(arch, to, from, ring, rank, slice_idx);
    if (stop != WaitStatus::kNone) return stop;
  }
  return WaitStatus::kNone;
}

struct Kind {
  bool has_death = false;
  bool steps_on_payload = true;
  Extent extent = {};
};

Scenario ring(std::string name, Ring parameters, Kind kind) {
  auto shape = std::make_shared<Ring>(std::move(parameters));
  const ChunkLayout layout(shape->num_elems, shape->num_ranks);
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.text = "ring all-reduce, " + std::to_string(shape->num_ranks) + " ranks, " +
                  std::to_string(shape->num_slots) + " slots, " + std::to_string(shape->num_elems) +
                  " elements in " +
                  std::to_string(num_slices(layout.max_chunk_elems(), shape->slot_elems)) +
                  " slices";
  scenario.num_ranks = shape->num_ranks;
  scenario.extent = kind.extent;
  scenario.has_death = kind.has_death;
  scenario.steps_on_payload = kind.steps_on_payload;
  scenario.setup = [shape](Memory& memory) { shape->lay_out(memory); };
  scenario.body = [shape](CheckerArch& arch, int rank) {
    return ring_all_reduce(arch, *shape, rank);
  };
  scenario.check = [shape](const Memory& memory, int rank) { return shape->check(memory, rank); };
  return scenario;
}

}  // namespace

std::vector<Scenario> ring_scenarios() {
  const Extent two_preemptions{.kind = Extent::Kind::kBounded, .max_preemptions = 2};
  const Extent walks{.kind = Extent::Kind::kWalks, .num_walks = 20'000, .seed = 20260801};
  return {
      ring("ring2", {2, 2, 6, 1, {}, {}}, {}),
      ring("ring2_uneven", {2, 2, 3, 1, {}, {}}, {}),
      ring("ring2_death", {2, 2, 6, 1, {}, {}}, {.has_death = true}),
      ring("ring3", {3, 2, 3, 1, {}, {}}, {.steps_on_payload = false}),
      ring("ring4", {4, 2, 4, 1, {}, {}}, {.steps_on_payload = false, .extent = two_preemptions}),
      ring("ring3_death", {3, 2, 3, 1, {}, {}},
           {.has_death = true, .steps_on_payload = false, .extent = two_preemptions}),
      ring("ring4_walks", {4, 2, 8, 1, {}, {}}, {.has_death = true, .extent = walks}),
  };
}

}  // namespace ringcomm::checker
