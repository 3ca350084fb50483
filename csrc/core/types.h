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
  kSoftmaxStats,  ///< reduce/softmax_merge.h; only Reduction::kMerge
};
inline constexpr int kNumDTypes = 15;

/// How the ranks' elements are combined. Names and meaning as in torch.distributed.ReduceOp, except
/// kMerge: merges records as their type defines.
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

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kByte:
      return "byte";
    case DType::kBool:
      return "bool";
    case DType::kUint8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUint16:
      return "uint16";
    case DType::kUint32:
      return "uint32";
    case DType::kUint64:
      return "uint64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kSoftmaxStats:
      return "softmax_stats";
  }
  return "unknown dtype";
}

constexpr const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return "sum";
    case Reduction::kAvg:
      return "avg";
    case Reduction::kProduct:
      return "product";
    case Reduction::kMin:
      return "min";
    case Reduction::kMax:
      return "max";
    case Reduction::kBitAnd:
      return "band";
    case Reduction::kBitOr:
      return "bor";
    case Reduction::kBitXor:
      return "bxor";
    case Reduction::kMerge:
      return "merge";
  }
  return "unknown reduction";
}

}  // namespace ringcomm
