#include "checker_arch.h"
#include "core/packet_protocol.h"
#include "scenarios.h"

namespace ringcomm::checker {
namespace {

/// Calls in which each of two ranks puts one packet into the other's memory, and takes its own.
struct Exchange {
  int num_calls = 0;
  bool stores_high_first = false;

  Cursor* cursors = nullptr;
  std::byte* outputs[2] = {};  ///< per rank: what it took, by call

  Packet& packet(int to, std::uint64_t number) const {
    return reinterpret_cast<Packet&>(
        cursors[2 * (2 * static_cast<std::size_t>(to) + packet_turn(number))]);
  }
  /// Other halves in every call, since parking looks at those alone.
  static std::uint64_t data(int from, std::uint64_t number) {
    const std::uint64_t half = number * 16 + static_cast<std::uint64_t>(from) + 1;
    return half << 32 | half;
  }

  void lay_out(Memory& memory) {
    std::vector<std::string> names;
    for (int to = 0; to < 2; ++to)
      for (const char* turn : {"odd", "even"})
        for (const char* half : {"low", "high"})
          names.push_back(std::string(half) + " " + turn + " to " + std::to_string(to));
    cursors = memory.add_cursors(static_cast<int>(names.size()), names);
  }
  static std::string check(const Memory&, int) { return {}; }
};

std::uint64_t await_packet(CheckerArch& arch, const Packet& mine, std::uint64_t number) {
  const std::uint32_t flag = packet_flag(number);
  std::uint64_t data = 0;
  for (;;) {
    std::uint64_t low = 0, high = 0;
    arch.load_packet(mine, low, high);
    if (open_packet(low, high, flag, data)) return data;
    for (const bool is_high : {false, true}) {
      const std::uint64_t seen = arch.load_acquire(CheckerArch::half_of(mine, is_high).value);
      if (seen >> 32 == flag) continue;
      arch.park(CheckerArch::half_of(mine, is_high).value, seen);
      break;
    }
  }
}

WaitStatus exchange(CheckerArch& arch, const Exchange& shape, int rank) {
  arch.stores_high_first = shape.stores_high_first;
  for (std::uint64_t number = 1; number <= static_cast<std::uint64_t>(shape.num_calls); ++number) {
    arch.checkpoint(number);
    const std::uint32_t flag = packet_flag(number);
    put_packet(arch, shape.packet(1 - rank, number), Exchange::data(rank, number), flag);
    const std::uint64_t data = await_packet(arch, shape.packet(rank, number), number);
    arch.require(data == Exchange::data(1 - rank, number), ViolationKind::kWrongData,
                 "took a packet of another call");
  }
  return WaitStatus::kNone;
}

Scenario packets(std::string name, int num_calls, bool stores_high_first) {
  const std::string text = "packets, 2 ranks, " + std::to_string(num_calls) + " calls, " +
                           (stores_high_first ? "high" : "low") + " halves first";
  const Exchange shape{.num_calls = num_calls, .stores_high_first = stores_high_first};
  return scenario_of(std::move(name), text, 2, shape, exchange);
}

}  // namespace

std::vector<Scenario> packet_scenarios() {
  return {packets("packet2", 5, false), packets("packet2_high", 5, true)};
}

}  // namespace ringcomm::checker
