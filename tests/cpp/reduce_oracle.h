#pragma once

// The reductions once more, slowly, one element at a time and in wider arithmetic, sharing no line
// with kernels/reductions.
//
//   integers   __int128, wrapped to the type after every step
//   float32    double: wide enough (53 >= 2 * 24 + 2) that rounding its result again gives the
//   float operation's float16, bfloat16   as float32, then rounded to the format's quantum float64
//   the processor's own scalar operations
//   softmax_stats   double; bit for bit where no step rounds (exact_stats)

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "kernels/common/types.h"
#include "kernels/losses/softmax_merge.h"

namespace ringcomm::oracle {

using Bytes = std::vector<unsigned char>;
__extension__ typedef __int128 Wide;
__extension__ typedef unsigned __int128 UnsignedWide;

inline bool is_float(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

inline bool is_bitwise(Reduction reduction) {
  return reduction == Reduction::kBitAnd || reduction == Reduction::kBitOr ||
         reduction == Reduction::kBitXor;
}

/// The pairs that have an operator.
inline bool has_meaning(Reduction reduction, DType dtype) {
  if (dtype == DType::kByte) return false;
  if (dtype == DType::kSoftmaxStats || reduction == Reduction::kMerge)
    return dtype == DType::kSoftmaxStats && reduction == Reduction::kMerge;
  if (dtype == DType::kBool) return reduction != Reduction::kAvg;
  return !(is_float(dtype) && is_bitwise(reduction));
}

/// A 16-bit float format with `mantissa_bits` explicit bits.
struct Format16 {
  int mantissa_bits;

  int exponent_bits() const { return 15 - mantissa_bits; }
  int bias() const { return (1 << (exponent_bits() - 1)) - 1; }
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits()) - 1) << mantissa_bits);
  }

  float decode(std::uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    double value = 0;
    if (exponent == (1 << exponent_bits()) - 1) {
      value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                            : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    } else {
      value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
    }
    return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
  }

  std::uint16_t encode(float value) const {
    if (std::isnan(value))
      return static_cast<std::uint16_t>(infinity() | (1 << (mantissa_bits - 1)));
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude == 0) return sign;
    if (std::isinf(magnitude)) return sign | infinity();
    const int exponent = std::max(std::ilogb(magnitude), 1 - bias());
    // How many quanta: below 2^mantissa_bits the value is subnormal, and a round-up to the next
    // power carries into the exponent, both because the encodings of neighbours are neighbours.
    const auto quanta =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    const int bits = ((exponent + bias() - 1) << mantissa_bits) + quanta;
    return sign | static_cast<std::uint16_t>(std::min<int>(bits, infinity()));
  }
};

inline constexpr Format16 kFormatFloat16{10};
inline constexpr Format16 kFormatBFloat16{7};

inline const Format16& format_of(DType dtype) {
  return dtype == DType::kFloat16 ? kFormatFloat16 : kFormatBFloat16;
}

template <class T>
T element(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
  return value;
}

// Keeps the first of equals and propagates NaN.
template <class F>
F float_step(Reduction reduction, F a, F b) {
  using Calc = std::conditional_t<std::is_same_v<F, float>, double, F>;
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kAvg:
      return static_cast<F>(static_cast<Calc>(a) + static_cast<Calc>(b));
    case Reduction::kProduct:
      return static_cast<F>(static_cast<Calc>(a) * static_cast<Calc>(b));
    default:
      break;
  }
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<F>::quiet_NaN();
  if (reduction == Reduction::kMin) return b < a ? b : a;
  if (reduction == Reduction::kMax) return b > a ? b : a;
  throw std::logic_error("no such reduction on floats");
}

template <class F, class Decode>
F float_result(Reduction reduction, const std::vector<Bytes>& srcs, std::size_t i, int divisor,
               Decode decode) {
  F acc = decode(srcs[0], i);
  for (std::size_t s = 1; s < srcs.size(); ++s)
    acc = float_step<F>(reduction, acc, decode(srcs[s], i));
  if (divisor > 1) {
    using Calc = std::conditional_t<std::is_same_v<F, float>, double, F>;
    acc = static_cast<F>(static_cast<Calc>(acc) / static_cast<Calc>(divisor));
  }
  return std::isnan(acc) ? std::numeric_limits<F>::quiet_NaN() : acc;
}

inline Wide integer_step(Reduction reduction, Wide a, Wide b) {
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kAvg:
      return a + b;
    case Reduction::kProduct:
      // Unsigned: the product of two of 64 bits has 128, and no room for a sign.
      return static_cast<Wide>(static_cast<UnsignedWide>(a) * static_cast<UnsignedWide>(b));
    case Reduction::kMin:
      return b < a ? b : a;
    case Reduction::kMax:
      return b > a ? b : a;
    case Reduction::kBitAnd:
      return a & b;
    case Reduction::kBitOr:
      return a | b;
    case Reduction::kBitXor:
      return a ^ b;
    default:
      throw std::logic_error("no such reduction");
  }
}

template <class T>
T integer_result(Reduction reduction, const std::vector<Bytes>& srcs, std::size_t i, int divisor) {
  T acc = element<T>(srcs[0], i);
  for (std::size_t s = 1; s < srcs.size(); ++s) {
    acc = static_cast<T>(integer_step(reduction, acc, element<T>(srcs[s], i)));
  }
  return divisor > 1 ? static_cast<T>(static_cast<Wide>(acc) / divisor) : acc;
}

inline unsigned char bool_result(Reduction reduction, const std::vector<Bytes>& srcs,
                                 std::size_t i) {
  int num_true = 0;
  for (const Bytes& src : srcs) num_true += src[i] != 0 ? 1 : 0;
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMax:
    case Reduction::kBitOr:
      return num_true > 0;
    case Reduction::kBitXor:
      return num_true % 2;
    default:
      return num_true == static_cast<int>(srcs.size());
  }
}

inline std::uint16_t result16(Format16 format, Reduction reduction, const std::vector<Bytes>& srcs,
                              std::size_t i, int divisor) {
  const auto decode = [format](const Bytes& src, std::size_t k) {
    return format.decode(element<std::uint16_t>(src, k));
  };
  return format.encode(float_result<float>(reduction, srcs, i, divisor, decode));
}

/// A part without logits.
inline constexpr SoftmaxStats kNoLogits = {.max = -std::numeric_limits<float>::infinity(),
                                           .sum = 0,
                                           .target = 0,
                                           .weighted = 0,
                                           .entropy = 0,
                                           .argmax = kNoIndex};

/// Stats that merge without rounding, and so in any order: small integers, with no or equal largest
/// logits, or with largest logits so far apart that the exponentials of the smaller ones are 0.
inline SoftmaxStats exact_stats(std::uint32_t random) {
  const auto digit = [&random](std::uint32_t base) {
    const std::uint32_t value = random % base;
    random /= base;
    return static_cast<float>(value);
  };
  const float level = digit(4);
  if (level == 0) return kNoLogits;
  return {.max = 1000 * level - 2000,
          .sum = 1 + digit(7),
          .target = digit(7) - 3,
          .weighted = digit(7) - 3,
          .entropy = 0 - digit(7),
          .argmax = static_cast<std::int32_t>(digit(50))};
}

inline SoftmaxStats merged_stats(const std::vector<SoftmaxStats>& parts) {
  SoftmaxStats whole = kNoLogits;
  double sum = 0, target = 0, weighted = 0, entropy = 0;
  for (const SoftmaxStats& part : parts) {
    if (part.max > whole.max) whole.argmax = kNoLogits.argmax;
    whole.max = std::max(whole.max, part.max);
    if (part.max == whole.max) whole.argmax = std::min(whole.argmax, part.argmax);
  }
  for (const SoftmaxStats& part : parts) {
    const double distance =
        part.max == whole.max ? 0 : static_cast<double>(part.max) - static_cast<double>(whole.max);
    target += part.target;
    weighted += part.weighted;
    sum += part.sum * std::exp(distance);
    if (part.sum != 0) entropy += std::exp(distance) * (part.entropy + part.sum * distance);
  }
  whole.sum = static_cast<float>(sum);
  whole.target = static_cast<float>(target);
  whole.weighted = static_cast<float>(weighted);
  whole.entropy = static_cast<float>(entropy);
  return whole;
}

template <class Result>
Bytes collect(std::size_t num_elems, Result result_of) {
  using T = decltype(result_of(std::size_t{0}));
  Bytes bytes(num_elems * sizeof(T));
  for (std::size_t i = 0; i < num_elems; ++i) {
    const T value = result_of(i);
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

/// The expected result of ReduceOp::combine, byte for byte.
inline Bytes reduce(Reduction reduction, DType dtype, const std::vector<Bytes>& srcs,
                    std::size_t num_elems, int divisor) {
  const auto integers = [&]<class T>(T) {
    return collect(num_elems,
                   [&](std::size_t i) { return integer_result<T>(reduction, srcs, i, divisor); });
  };
  const auto floats = [&]<class T>(T) {
    return collect(num_elems, [&](std::size_t i) {
      return float_result<T>(reduction, srcs, i, divisor, element<T>);
    });
  };
  const auto floats16 = [&](Format16 format) {
    return collect(num_elems,
                   [&](std::size_t i) { return result16(format, reduction, srcs, i, divisor); });
  };
  switch (dtype) {
    case DType::kBool:
      return collect(num_elems, [&](std::size_t i) { return bool_result(reduction, srcs, i); });
    case DType::kUint8:
      return integers(std::uint8_t{});
    case DType::kInt8:
      return integers(std::int8_t{});
    case DType::kInt16:
      return integers(std::int16_t{});
    case DType::kInt32:
      return integers(std::int32_t{});
    case DType::kInt64:
      return integers(std::int64_t{});
    case DType::kUint16:
      return integers(std::uint16_t{});
    case DType::kUint32:
      return integers(std::uint32_t{});
    case DType::kUint64:
      return integers(std::uint64_t{});
    case DType::kFloat16:
      return floats16(kFormatFloat16);
    case DType::kBFloat16:
      return floats16(kFormatBFloat16);
    case DType::kFloat32:
      return floats(float{});
    case DType::kFloat64:
      return floats(double{});
    case DType::kSoftmaxStats:
      return collect(num_elems, [&](std::size_t i) {
        std::vector<SoftmaxStats> parts;
        for (const Bytes& src : srcs) parts.push_back(element<SoftmaxStats>(src, i));
        return merged_stats(parts);
      });
    case DType::kByte:
      break;
  }
  throw std::logic_error("bytes have no reduction");
}

}  // namespace ringcomm::oracle
