#pragma once

#include <cstddef>

#include "device/reduce_op.h"

namespace ringcomm {

/// From this size of the whole result on, it is not in a cache when the caller looks at it, and
/// stores past the caches save reading what they overwrite (docs/experiments.md, "all_gather").
/// Below, they cost what they save.
inline constexpr std::size_t kStreamedResultBytes = std::size_t{16} << 20;

/// Copies what a peer staged into a result of `result_bytes` in all, of which this rank has not
/// read the part that is overwritten.
inline void copy_result(void* to, const void* from, std::size_t num_bytes,
                        std::size_t result_bytes) {
  if (num_bytes == 0 || to == from) return;
  const bool is_streamed = result_bytes >= kStreamedResultBytes;
  host::copy_bytes(to, from, num_bytes,
                   is_streamed ? host::StoreKind::kStreaming : host::StoreKind::kCached);
}

}  // namespace ringcomm
