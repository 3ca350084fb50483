#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/board_protocol.h"
#include "machine.h"

namespace ringcomm::checker {

std::vector<Scenario> all_to_all_scenarios();
std::vector<Scenario> board_scenarios();
std::vector<Scenario> link_scenarios();
std::vector<Scenario> packet_scenarios();
std::vector<Scenario> survivor_scenarios();

/// One whose memory `given` lays out, and whose ranks run body(arch, shape, rank).
template <class Shape, class Body>
Scenario scenario_of(std::string name, std::string text, int num_ranks, Shape given, Body body) {
  auto shape = std::make_shared<Shape>(std::move(given));
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.text = std::move(text);
  scenario.num_ranks = num_ranks;
  scenario.setup = [shape](Memory& memory) { shape->lay_out(memory); };
  scenario.body = [shape, body](CheckerArch& arch, int rank) { return body(arch, *shape, rank); };
  scenario.check = [shape](const Memory& memory, int rank) { return shape->check(memory, rank); };
  return scenario;
}

/// What rank `rank` contributes at `elem_idx`: sums show which ranks are missing or counted twice.
constexpr std::uint64_t input_of(int rank, std::size_t elem_idx) {
  return (static_cast<std::uint64_t>(elem_idx) + 1) << (12 * rank);
}

/// Empty if the block holds `expected`.
inline std::string compare(const Memory& memory, const std::byte* block, std::uint64_t expected) {
  const std::uint64_t value = memory.peek(block);
  if (value == expected) return {};
  return "finished with " + std::to_string(value) + " instead of " + std::to_string(expected) +
         " in " + memory.cell_name(memory.cell_idx(block));
}

/// Boards whose ranks have two cursors each, by the phase's parity, and two regions.
inline BoardGeometry lay_out_boards(Memory& memory, int num_ranks, int region_blocks) {
  std::vector<std::string> names;
  for (int rank = 0; rank < num_ranks; ++rank)
    for (const char* parity : {", even", ", odd"})
      names.push_back("published " + std::to_string(rank) + parity);
  const std::size_t region_bytes = static_cast<std::size_t>(region_blocks) * kBlockBytes;
  return {.world_size = num_ranks,
          .cursors = reinterpret_cast<std::byte*>(memory.add_cursors(2 * num_ranks, names)),
          .regions = memory.add_shared(2 * num_ranks * region_blocks, "regions"),
          .region_stride_bytes = region_bytes,
          .region_bytes = region_bytes};
}

}  // namespace ringcomm::checker
