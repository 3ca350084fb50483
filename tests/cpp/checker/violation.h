#pragma once

#include <string>

namespace ringcomm::checker {

/// The errors of a protocol. run_mutants.py uses these names and expects one per mutant.
enum class ViolationKind {
  kRace,       ///< payload accesses that no publication orders
  kUnowned,    ///< a slot or region touched outside its owner's turn
  kDeadlock,   ///< no rank can run and one has not finished: a lost wake-up, a missed death, a
               ///< cycle
  kWrongData,  ///< a rank finished and its result is not the exact sum or copy
  kBadStop,    ///< a rank stopped without a reason, or although its condition had been published
};

struct Violation {
  ViolationKind kind;
  std::string text;
};

const char* name_of(ViolationKind kind);

}  // namespace ringcomm::checker
