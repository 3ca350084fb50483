#pragma once

#include <cstddef>

namespace ringcomm {

/// A row of num_elems elements of one type at each address; `x` and `residual` are written.
struct NormRow {
  void* x = nullptr;
  void* residual = nullptr;
  const void* weight = nullptr;
  std::size_t num_elems = 0;
  float eps = 0;
};

/// residual = x + residual, then x = residual / sqrt(mean(residual^2) + eps) * weight. All
/// arithmetic is fp32, and each result is rounded once, to nearest even; the mean is that of the
/// rounded residual. Results depend on the values alone, never on the instruction set.
using AddRmsNorm = void (*)(const NormRow& row);

}  // namespace ringcomm
