#pragma once

#include <span>

#include "ptx/types.h"

namespace ringcomm::ptx {

/// The elements of a tensor that a launch was given: rows of bytes, which begin a stride apart.
struct TensorMemory {
  u64 begin;
  u64 num_rows;
  u64 row_stride_bytes;
  u64 row_bytes;
};

/// Before a launch: what its kernel may access.
void begin_launch(std::span<const TensorMemory> tensors);

}  // namespace ringcomm::ptx
