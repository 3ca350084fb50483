#pragma once

#include <cstdint>

#include "collectives/algorithm.h"

namespace ringcomm {

/// The traffic of one call on this rank.
struct Traffic {
  std::uint64_t sent_bytes = 0;  ///< bytes that peers consume from this rank
  /// Bytes that this rank wrote where its peers read them, and that it copied from there or from
  /// its own input into its results. What a reduction writes straight into a result is no copy.
  std::uint64_t copied_bytes = 0;
  Algorithm algorithm = Algorithm::kDirect;  ///< the algorithm that ran; the location of buffers
                                             ///< may allow a better one than planned
};

}  // namespace ringcomm
