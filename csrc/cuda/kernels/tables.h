#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "cuda/kernels/limits.h"

// Tables that the threads of a block prepare for each other, each for one rank, so that no thread
// has to compute the addresses of all ranks for every 16 bytes.

namespace ringcomm::cuda {

/// One of the copies that a block makes together.
struct Copy {
  std::byte* to;
  const std::byte* from;
  std::uint32_t num_bytes;
  std::uint32_t num_vectors;  ///< of 16 bytes, in front; 0 where an address is not aligned
};

/// The distance between copies in a list of vectors, and the factor that replaces a division by it.
/// Unused for a single copy.
struct Stride {
  std::uint32_t num_vectors = 0;
  std::uint32_t inverse = 0;
};

/// The copies, sources and outputs of one step. `Tables` has those of two: a step's tables are
/// written while those of the previous step are read, with the barrier of a publication between
/// writing and reading.
struct StepTables {
  Copy staged[kMaxRanks];
  Copy taken[kMaxRanks];
  const std::byte* sources[kMaxRanks];
  std::byte* outputs[kMaxRanks];
  std::uint64_t source_policies[kMaxRanks];  ///< cache_policy(), of each source
  std::uint64_t output_policy;               ///< the same, of outputs but the first
  int num_outputs;
};
/// Whether the ranks have lent their buffers to a call. All ranks see the same headings, so all
/// make the same decision.
enum class Lending : std::uint8_t {
  kUnknown,  ///< the call's first phase, which has the headings, is not complete yet
  kNone,
  kSome,
  kAll
};

/// The local addresses of the buffers that each rank has lent to this one; see Heading.
struct LentTables {
  Lending lending;
  bool is_lent[kMaxRanks];
  bool is_kept[kMaxRanks];
  const std::byte* inputs[kMaxRanks];
  std::byte* outputs[kMaxRanks];
};
struct Tables {
  StepTables of_steps[2];
  LentTables lent;
  RINGCOMM_HD StepTables& of(std::uint32_t step) { return of_steps[step % 2]; }
};

}  // namespace ringcomm::cuda
