#include <memory>

#include "checker_arch.h"
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

  void lay_out(Memory& memory, bool has_owner) {
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

Scenario one_way(std::string name, OneWay parameters, bool has_death) {
  auto shape = std::make_shared<OneWay>(parameters);
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.text = "one link, " + std::to_string(shape->num_messages) + " messages of " +
                  std::to_string(shape->message_blocks) + " blocks, " +
                  std::to_string(shape->num_slots) + " slots" +
                  (shape->polls ? ", polling first" : "");
  scenario.has_death = has_death;
  scenario.setup = [shape](Memory& memory) { shape->lay_out(memory, true); };
  scenario.body = [shape](CheckerArch& arch, int rank) {
    return rank == 0 ? one_way_sender(arch, *shape) : one_way_receiver(arch, *shape);
  };
  scenario.check = [shape](const Memory& memory, int rank) { return shape->check(memory, rank); };
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
    const WaitStatus stop =
        rank == 0 ? one_way_sender(arch, *narrow) : one_way_receiver(arch, *narrow);
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

}  // namespace

std::vector<Scenario> link_scenarios() {
  const OneWay three{.num_messages = 3, .message_blocks = 2};
  const OneWay five{.num_messages = 5, .message_blocks = 2};
  const OneWay polling{.num_messages = 4, .message_blocks = 2, .polls = true};
  return {one_way("link", five, false), one_way("link_death", three, true),
          one_way("link_poll", polling, false), one_way("link_poll_death", polling, true), recut()};
}

}  // namespace ringcomm::checker
