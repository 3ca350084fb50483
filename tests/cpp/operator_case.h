#pragma once

// What the tests of operators have in common: arrays between guards, the floats of each format, and
// the levels of SIMD that this CPU has.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "kernels/common/tables.h"
#include "kernels/common/types.h"
#include "reduce_oracle.h"

namespace ringcomm::testing {

using Floats = std::vector<float>;

/// What `find` has of each level that this CPU has, the baseline first.
template <class Table>
std::vector<const Table*> available_levels(const Table* (*find)(std::string_view level)) {
  std::vector<const Table*> levels;
  for (const char* name : {"baseline", "avx2", "avx512"})
    if (const Table* table = find(name)) levels.push_back(table);
  return levels;
}

inline std::vector<const cpu::Kernels*> kernel_levels() {
  return available_levels(cpu::find_kernels);
}

/// An array between two guards.
class Guarded {
 public:
  Guarded(std::size_t num_bytes, std::size_t offset_bytes)
      : num_bytes_(num_bytes),
        offset_bytes_(kGuardBytes + offset_bytes),
        bytes_(offset_bytes_ + num_bytes + kGuardBytes, kGuard) {}
  /// With this content.
  Guarded(const oracle::Bytes& content, std::size_t offset_bytes)
      : Guarded(content.size(), offset_bytes) {
    fill(content);
  }

  void* data() { return bytes_.data() + offset_bytes_; }
  void fill(const oracle::Bytes& content) {
    if (!content.empty()) std::memcpy(data(), content.data(), content.size());
  }
  void overwrite() { std::memset(data(), 0xee, num_bytes_); }
  bool holds(const oracle::Bytes& content) const {
    return content.size() == num_bytes_ && holds_begin_of(content);
  }
  bool holds_begin_of(const oracle::Bytes& content) const {
    return std::equal(begin(), end(), content.begin());
  }
  bool is_untouched() const { return std::all_of(begin(), end(), is_guard); }
  bool is_guarded() const {
    return std::all_of(bytes_.begin(), begin(), is_guard) &&
           std::all_of(end(), bytes_.end(), is_guard);
  }
  oracle::Bytes content() const { return {begin(), end()}; }

 private:
  static constexpr std::size_t kGuardBytes = 128;  // at least two of the widest vectors
  static constexpr unsigned char kGuard = 0xa5;

  static bool is_guard(unsigned char byte) { return byte == kGuard; }
  oracle::Bytes::const_iterator begin() const {
    return bytes_.begin() + static_cast<std::ptrdiff_t>(offset_bytes_);
  }
  oracle::Bytes::const_iterator end() const {
    return begin() + static_cast<std::ptrdiff_t>(num_bytes_);
  }

  std::size_t num_bytes_;
  std::size_t offset_bytes_;
  oracle::Bytes bytes_;
};

// ---- floats of fp32, fp16 and bf16

/// In the memory of the dtype.
inline oracle::Bytes encoded(const Floats& values, DType dtype) {
  if (dtype == DType::kFloat32)
    return oracle::collect(values.size(), [&](std::size_t i) { return values[i]; });
  const oracle::Format16& format = oracle::format_of(dtype);
  return oracle::collect(values.size(), [&](std::size_t i) { return format.encode(values[i]); });
}

/// Element `i` of such memory.
inline float decoded(const oracle::Bytes& bytes, std::size_t i, DType dtype) {
  if (dtype == DType::kFloat32) return oracle::element<float>(bytes, i);
  return oracle::format_of(dtype).decode(oracle::element<std::uint16_t>(bytes, i));
}

inline Floats decoded(const oracle::Bytes& bytes, DType dtype) {
  Floats values;
  for (std::size_t i = 0; i < bytes.size() / element_bytes(dtype); ++i)
    values.push_back(decoded(bytes, i, dtype));
  return values;
}

inline bool is_same(const Floats& a, const Floats& b) {
  return encoded(a, DType::kFloat32) == encoded(b, DType::kFloat32);
}

/// Of many sizes.
inline Floats random_floats(std::mt19937& random, std::size_t num) {
  std::normal_distribution<float> normal;
  Floats values;
  for (std::size_t i = 0; i < num; ++i)
    values.push_back(std::ldexp(normal(random), static_cast<int>(random() % 9) - 6));
  return values;
}

/// Puts special values for formats and comparisons at every `stride`-th place.
inline void put_special(Floats& values, std::size_t stride) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float special[] = {0.0F,           -0.0F,  kInf,    -kInf, std::nanf("0x123"),
                           -std::nanf(""), 1e-45F, -1e-39F, 3e38F, -3e38F,
                           65520.0F};
  for (std::size_t i = 0; i < values.size(); i += stride) values[i] = special[i / stride % 11];
}

}  // namespace ringcomm::testing
