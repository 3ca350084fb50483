#pragma once

// Vector types of the compiler (GCC and clang), with the width of one level: RINGCOMM_VECTOR_BYTES,
// which the includer defines after its target pragma.
//
// Everything here and in the kernels has internal linkage and every function that takes a vector is
// forced inline. A function with external linkage would be merged by the linker with its namesake
// of another level, or of a file that knows nothing of levels, and crash processors without the
// instructions. For the same reason no function template of the standard library is called below a
// target pragma.

#include <cstddef>
#include <cstdint>

namespace ringcomm::host {
namespace {

constexpr std::size_t kVectorBytes = RINGCOMM_VECTOR_BYTES;

template <class T, std::size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

template <class T>
using Vec = typename VectorOf<T, kVectorBytes>::type;

/// The same number of elements of half the width.
template <class T>
using HalfVec = typename VectorOf<T, kVectorBytes / 2>::type;

template <class V>
[[gnu::always_inline]] inline V load_bytes(const char* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
[[gnu::always_inline]] inline void store_bytes(char* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof v);
}

template <class To, class From>
[[gnu::always_inline]] inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)from;
}

/// The running result for one vector of memory: `kParts` vectors of T (two where 16-bit elements
/// are held as fp32).
template <class T, int kParts>
struct Accumulator {
  Vec<T> part[kParts];
};

}  // namespace
}  // namespace ringcomm::host
