#pragma once

#include <vector>

#include "machine.h"

namespace ringcomm::checker {

std::vector<Scenario> link_scenarios();
std::vector<Scenario> ring_scenarios();
std::vector<Scenario> board_scenarios();
std::vector<Scenario> host_scenarios();
std::vector<Scenario> lend_scenarios();
std::vector<Scenario> packet_scenarios();
std::vector<Scenario> share_scenarios();
std::vector<Scenario> survivor_scenarios();

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

}  // namespace ringcomm::checker
