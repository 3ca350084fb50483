#include <memory>

#include "checker_arch.h"
#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// Rank 0 sends, rank 1 receives.
struct OneWay {
  int num_messages = 0;
  int num_slots = 2;
  int message_blocks = 0;
  bool polls = false;  ///< try_acquire() and try_wait() before their waiting forms

  LinkGeometry geometry = {};
  std::byte* input = nullptr;
  std::byte* output = nullptr;

  std::size_t message_bytes() const {
    return static_cast<std::size_t>(message_blocks) * kBlockBytes;
  }

  void lay_out(Memory& memory, bool has_owner = true) {
    Cursor* cursors = memory.add_cursors(2, {"tail", "head"});
    auto* link = reinterpret_cast<LinkCursors*>(cursors);
    geometry = {&link->tail, &link->head, memory.add_shared(num_slots * message_blocks, "slots"),
                static_cast<std::uint32_t>(num_slots), message_bytes()};
    if (has_owner) {
      memory.own_as_link(geometry.slots, num_slots, message_blocks, link->tail, link->head, 0, 1);
    }
    const int num_blocks = num_messages * message_blocks;
    input = memory.add_private(0, num_blocks, "input");
    output = memory.add_private(1, num_blocks, "output");
    for (int i = 0; i < num_blocks; ++i) memory.poke(input + i * kBlockBytes, input_of(0, i));
  }

  std::string check(const Memory& memory, int rank) const {
    for (int i = 0; rank == 1 && i < num_messages * message_blocks; ++i) {
      const std::string fault = compare(memory, output + i * kBlockBytes, input_of(0, i));
      if (!fault.empty()) return fault;
    }
    return {};
  }
};

WaitStatus send_one(CheckerArch& arch, SendLink<CheckerArch>& link, const OneWay& shape,
                    int message_idx) {
  const std::byte* input = shape.input + message_idx * shape.message_bytes();
  std::byte* slot = nullptr;
  if (!shape.polls || !link.try_acquire(slot))
    return send(arch, link, input, shape.message_bytes());
  arch.copy(slot, input, shape.message_bytes());
  link.publish();
  return WaitStatus::kNone;
}

WaitStatus recv_one(CheckerArch& arch, RecvLink<CheckerArch>& link, const OneWay& shape,
                    int message_idx) {
  std::byte* output = shape.output + message_idx * shape.message_bytes();
  const std::byte* slot = nullptr;
  if (!shape.polls || !link.try_wait(slot)) return recv(arch, link, output, shape.message_bytes());
  arch.copy(output, slot, shape.message_bytes());
  link.release();
  return WaitStatus::kNone;
}

WaitStatus one_way_sender(CheckerArch& arch, const OneWay& shape) {
  SendLink<CheckerArch> link(arch, shape.geometry, 1);
  for (int i = 0; i < shape.num_messages; ++i) {
    arch.checkpoint(i);
    const WaitStatus stop = send_one(arch, link, shape, i);
    if (stop == WaitStatus::kNone) continue;
    // The receiver is dead, so its head is final: a credit that it gave must have been used.
    const auto in_flight = static_cast<std::uint64_t>(i) - arch.peek(shape.geometry.head->value);
    arch.require(in_flight >= shape.geometry.num_slots, ViolationKind::kBadStop,
                 "stopped with a slot free");
    return stop;
  }
  arch.checkpoint(shape.num_messages);
  return link.wait_drained(0);
}

WaitStatus one_way_receiver(CheckerArch& arch, const OneWay& shape) {
  RecvLink<CheckerArch> link(arch, shape.geometry, 0);
  for (int i = 0; i < shape.num_messages; ++i) {
    arch.checkpoint(i);
    const WaitStatus stop = recv_one(arch, link, shape, i);
    if (stop == WaitStatus::kNone) continue;
    const std::uint64_t tail = arch.peek(shape.geometry.tail->value);
    arch.require(tail <= static_cast<std::uint64_t>(i), ViolationKind::kBadStop,
                 "stopped although the message had been published");
    return stop;
  }
  return WaitStatus::kNone;
}

WaitStatus run_one_way(CheckerArch& arch, const OneWay& shape, int rank) {
  return rank == 0 ? one_way_sender(arch, shape) : one_way_receiver(arch, shape);
}

Scenario one_way(std::string name, const OneWay& shape, bool has_death) {
  const std::string text = "one link, " + std::to_string(shape.num_messages) + " messages of " +
                           std::to_string(shape.message_blocks) + " blocks, " +
                           std::to_string(shape.num_slots) + " slots" +
                           (shape.polls ? ", polling first" : "");
  Scenario scenario = scenario_of(std::move(name), text, 2, shape, run_one_way);
  scenario.has_death = has_death;
  return scenario;
}

/// After wait_drained(0) both ends cut the same bytes differently and go on: first slots of one
/// block, then of two. The checker's slot ownership does not know of the cut; clocks and values do
/// the checking.
Scenario recut() {
  auto narrow = std::make_shared<OneWay>(OneWay{.num_messages = 3, .message_blocks = 1});
  Scenario scenario;
  scenario.name = "link_recut";
  scenario.text = "one link, drained and cut anew: 3 messages of 1 block, then 1 of 2 blocks";
  auto wide = std::make_shared<OneWay>();
  scenario.setup = [narrow, wide](Memory& memory) {
    narrow->lay_out(memory, false);
    *wide = *narrow;
    wide->num_slots = 1;
    wide->message_blocks = 2;
    wide->num_messages = 1;
    wide->input = narrow->input + kBlockBytes;  // so that it does not deliver what is there already
    wide->geometry.num_slots = 1;
    wide->geometry.slot_bytes = wide->message_bytes();
  };
  scenario.body = [narrow, wide](CheckerArch& arch, int rank) {
    const WaitStatus stop = run_one_way(arch, *narrow, rank);
    if (stop != WaitStatus::kNone) return stop;
    if (rank == 0) {
      SendLink<CheckerArch> link(arch, wide->geometry, 1);
      arch.checkpoint(100);
      return send_one(arch, link, *wide, 0);
    }
    RecvLink<CheckerArch> link(arch, wide->geometry, 0);
    arch.checkpoint(100);
    return recv_one(arch, link, *wide, 0);
  };
  scenario.check = [narrow](const Memory& memory, int rank) {
    for (int i = 0; rank == 1 && i < 3; ++i) {
      const std::uint64_t expected = input_of(0, i < 2 ? i + 1 : 2);
      const std::string fault = compare(memory, narrow->output + i * kBlockBytes, expected);
      if (!fault.empty()) return fault;
    }
    return std::string{};
  };
  return scenario;
}

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

Scenario ring(std::string name, const Ring& shape, Kind kind) {
  const ChunkLayout layout(shape.num_elems, shape.num_ranks);
  const std::size_t count = num_slices(layout.max_chunk_elems(), shape.slot_elems);
  const std::string text = "ring all-reduce, " + std::to_string(shape.num_ranks) + " ranks, " +
                           std::to_string(shape.num_slots) + " slots, " +
                           std::to_string(shape.num_elems) + " elements in " +
                           std::to_string(count) + " slices";
  Scenario scenario = scenario_of(std::move(name), text, shape.num_ranks, shape, ring_all_reduce);
  scenario.extent = kind.extent;
  scenario.has_death = kind.has_death;
  scenario.steps_on_payload = kind.steps_on_payload;
  return scenario;
}

}  // namespace

std::vector<Scenario> link_scenarios() {
  const OneWay three{.num_messages = 3, .message_blocks = 2};
  const OneWay five{.num_messages = 5, .message_blocks = 2};
  const OneWay polling{.num_messages = 4, .message_blocks = 2, .polls = true};
  const Extent two_preemptions{.kind = Extent::Kind::kBounded, .max_preemptions = 2};
  const Extent walks{.kind = Extent::Kind::kWalks, .num_walks = 20'000, .seed = 20260801};
  return {
      one_way("link", five, false),
      one_way("link_death", three, true),
      one_way("link_poll", polling, false),
      one_way("link_poll_death", polling, true),
      recut(),
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
