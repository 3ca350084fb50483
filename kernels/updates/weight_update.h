#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace ringcomm {

/// How a weight is kept, and rounded when it is written; docs/design/optim.md has the formulas.
enum class WeightFormat : std::uint8_t {
  kFloat32,
  kFloat16,     ///< to nearest even
  kBFloat16,    ///< to nearest even
  kStochastic,  ///< bfloat16: 16 random bits are added, and the lower 16 bits dropped
  kSplit        ///< bfloat16 and, in `low`, the remaining bits of an fp32 weight
};
inline constexpr int kNumWeightFormats = 5;

/// The numbers of a step, computed in double and rounded once. The update of a weight is u =
/// clamp(scale * gradient, +-clip_value), times its factors if it has some, and the weight becomes
/// fma(u, lr_minus, weight * decay) in fp32, rounded to its format.
struct WeightStep {
  float scale = 1;
  float clip_value = std::numeric_limits<float>::infinity();
  float lr_minus = 0;     ///< the negative step size
  float decay = 1;        ///< 1 - lr * weight_decay
  std::uint32_t key = 0;  ///< of the random bits: rounding_key() of stochastic_rounding.h
};

/// Neighbours in memory and their gradients. Any address will do.
struct WeightRun {
  void* weight = nullptr;
  std::int16_t* low = nullptr;  ///< where the format is kSplit
  const void* grad = nullptr;
  const float* col_factor = nullptr;  ///< one for each element; null: no factors at all
  float row_factor = 1;               ///< of all of them
  std::uint64_t first_elem = 0;       ///< the number of the first, for its random bits
  std::size_t num_elems = 0;
};

struct RunSquares {
  double update = 0;  ///< the sum of u^2
  double weight = 0;  ///< of the fp32 weight's squares
};

/// The passes over weights of one format with gradients of one type. Results depend on the values
/// alone, never on the instruction set. Infinities and NaN go into them as in torch; every NaN is
/// stored as the canonical one.
struct WeightOps {
  void (*update)(const WeightStep& step, const WeightRun& run) = nullptr;
  /// Writes nothing.
  RunSquares (*squares)(const WeightStep& step, const WeightRun& run) = nullptr;
};

/// The passes over gradients of one type. Sums are in fp32 over few elements, so that a caller that
/// adds the results in double is within 1e-6 of the exact sum.
struct GradOps {
  /// Adds the square of each scaled and clamped element to its col_sums, and returns their sum.
  double (*add_squares)(const WeightStep& step, const void* grad, std::size_t num_elems,
                        float* col_sums) = nullptr;
  /// Adds the elements to sums.
  void (*add)(const void* grad, std::size_t num_elems, float* sums) = nullptr;
};

}  // namespace ringcomm
