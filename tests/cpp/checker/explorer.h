#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "machine.h"

namespace ringcomm::checker {

struct Result {
  std::uint64_t num_states = 0;
  std::uint64_t num_transitions = 0;
  std::uint64_t num_ends = 0;  ///< distinct final states, or walks
  std::uint64_t max_depth = 0;
  bool hit_limit = false;  ///< the search was cut off: nothing is proven
  std::optional<Violation> violation;
  std::vector<std::string> trace;  ///< the interleaving that led to it

  void add(const Result& other);
};

/// Runs the interleavings of `scenario` within its extent, with every victim if ranks may die.
/// Stops at the first violation.
Result explore(Machine& machine, const Scenario& scenario);

}  // namespace ringcomm::checker
