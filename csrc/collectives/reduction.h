#pragma once

#include <stdexcept>
#include <string>

#include "collectives/collective.h"
#include "reduce/reduce_op.h"

namespace ringcomm {

/// The reduction operator of a call. Throws std::invalid_argument where the reduction has no
/// meaning for the type.
inline const ReduceOp& reduce_op_of(const Collective& call) {
  const ReduceOp* op = host::find_reduce_op(call.reduction, call.dtype);
  if (op == nullptr)
    throw std::invalid_argument(std::string("reduction ") + name_of(call.reduction) +
                                " is not defined for " + name_of(call.dtype));
  return *op;
}

/// The reduction of all steps but the last one, which divides for an average.
inline Reduction undivided(Reduction reduction) {
  return reduction == Reduction::kAvg ? Reduction::kSum : reduction;
}

/// The divisor of the last step of the reduction.
inline int divisor_of(const Collective& call, int world_size) {
  return call.reduction == Reduction::kAvg ? world_size : 1;
}

/// Elements at `elems` of a buffer of `element_bytes` each.
inline const std::byte* at(const void* buffer, std::size_t elems, std::size_t element_bytes) {
  return static_cast<const std::byte*>(buffer) + elems * element_bytes;
}
inline std::byte* at(void* buffer, std::size_t elems, std::size_t element_bytes) {
  return static_cast<std::byte*>(buffer) + elems * element_bytes;
}

}  // namespace ringcomm
