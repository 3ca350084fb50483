#pragma once

#include <cstddef>

#include "kernels/common/types.h"

namespace ringcomm {

/// A reduction over elements of one type: an entry of the registry, chosen once per collective.
///
/// combine() reduces `num_srcs` >= 1 arrays left to right, element by element:
///
///     to[i] = srcs[0][i] (+) srcs[1][i] (+) ... (+) srcs[num_srcs - 1][i]
///
/// and stores the same value to `also_to` unless that is null. `to` and `also_to` may each be one
/// of `srcs`; any other overlap is forbidden. 16-bit floats accumulate in fp32 and are rounded
/// once, to nearest even, at the store. With `divisor` > 1 the result is divided by it before that
/// rounding (integers truncate towards zero). Min and max propagate NaN; a NaN in the result is the
/// canonical quiet one. Sums of integers wrap around. No result depends on the instruction set.
struct ReduceOp {
  std::size_t element_bytes = 0;  ///< arrays may have any address
  void (*combine)(void* to, void* also_to, const void* const* srcs, int num_srcs,
                  std::size_t num_elems, int divisor) = nullptr;
};

namespace cpu {

/// The reduction for this processor, or null where it has no meaning (bitwise on floats, anything
/// on kByte). kAvg gives the operator of kSum: the caller passes the divisor where the last rank's
/// share has been added.
const ReduceOp* find_reduce_op(Reduction reduction, DType dtype);

/// How bytes are stored into memory that another core will read.
enum class StoreKind { kCached, kStreaming };

/// memcpy, or with kStreaming, from AVX2 on, the same past the caches: faster where the reader's
/// core shares no cache with this one (each store then costs a read of the line it will overwrite),
/// slower where it does. Streaming stores are complete (ordered before any later store) when it
/// returns.
void copy_bytes(void* to, const void* from, std::size_t num_bytes, StoreKind kind);

/// The reduction of DType::kSoftmaxStats, on every level.
void merge_softmax_stats(void* to, void* also_to, const void* const* srcs, int num_srcs,
                         std::size_t num_elems, int divisor);

}  // namespace cpu
}  // namespace ringcomm
