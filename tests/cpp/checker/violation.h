#pragma once

#include <string>

namespace ringcomm::checker {

/// What a protocol can do wrong. The names are the vocabulary of run_mutants.py, which expects one
/// per mutant.
enum class ViolationKind {
  kRace,       ///< payload accesses that no publication orders
  kUnowned,    ///< a slot or region touched outside its owner's turn
  kDeadlock,   ///< nobody can move and somebody has not finished: a lost wake-up, a missed death, a
               ///< cycle
  kWrongData,  ///< a rank finished and its result is not the exact sum or copy
  kBadStop,  ///< a rank gave up without a reason, or although what it waited for had been published
};

struct Violation {
  ViolationKind kind;
  std::string text;
};

const char* name_of(ViolationKind kind);

}  // namespace ringcomm::checker
