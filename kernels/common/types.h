#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

/// Element types that can be reduced. Data that is only moved is counted in bytes (kByte).
enum class DType : std::uint8_t {
  kByte,  ///< opaque; no reduction
  kBool,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint16,
  kUint32,
  kUint64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kSoftmaxStats,  ///< losses/softmax_merge.h; only Reduction::kMerge
};
inline constexpr int kNumDTypes = 15;

/// As in torch.distributed.ReduceOp, and kMerge: merges records as their type defines.
enum class Reduction : std::uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
  kMerge
};
inline constexpr int kNumReductions = 9;

constexpr std::size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kByte:
    case DType::kBool:
    case DType::kUint8:
    case DType::kInt8:
      return 1;
    case DType::kInt16:
    case DType::kUint16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
      return 8;
    case DType::kSoftmaxStats:
      return 24;
  }
  return 0;
}

inline constexpr const char* kDTypeNames[kNumDTypes] = {
    "byte",   "bool",   "uint8",   "int8",     "int16",   "int32",   "int64",        "uint16",
    "uint32", "uint64", "float16", "bfloat16", "float32", "float64", "softmax_stats"};
inline constexpr const char* kReductionNames[kNumReductions] = {
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "merge"};

constexpr const char* name_of(DType dtype) {
  const auto idx = static_cast<std::size_t>(dtype);
  return idx < kNumDTypes ? kDTypeNames[idx] : "unknown dtype";
}

constexpr const char* name_of(Reduction reduction) {
  const auto idx = static_cast<std::size_t>(reduction);
  return idx < kNumReductions ? kReductionNames[idx] : "unknown reduction";
}

}  // namespace ringcomm
