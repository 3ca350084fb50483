#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "device/cuda/limits.h"

// What the threads of a block prepare for each other, each for one rank, so that none has to work
// out the addresses of all ranks for every 16 bytes.

namespace ringcomm::cuda {

/// One of the copies that a block makes together.
struct Copy {
  std::byte* to;
  const std::byte* from;
  std::uint32_t num_bytes;
  std::uint32_t num_vectors;  ///< of 16 bytes, in front; 0 where an address is not aligned
};

/// From a copy to the next in a list of vectors, and what a number is multiplied with to be divided
/// by that. Of a single copy there is no next.
struct Stride {
  std::uint32_t num_vectors = 0;
  std::uint32_t inverse = 0;
};

/// The copies, sources and outputs of one step. `Tables` has those of two: a step's are written
/// while those of the step before are read, and the barrier of a publication stands between writing
/// and reading.
struct StepTables {
  Copy staged[kMaxRanks];
  Copy taken[kMaxRanks];
  const std::byte* sources[kMaxRanks];
  std::byte* outputs[kMaxRanks];
};
struct Tables {
  StepTables of_steps[2];
  RINGCOMM_HD StepTables& of(std::uint32_t step) { return of_steps[step % 2]; }
};

}  // namespace ringcomm::cuda
