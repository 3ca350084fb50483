#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/elements.h"
#include "cuda/kernels/memory.h"

// Elements of any type, eight bytes at a time: the data of a packet.

namespace ringcomm::cuda {

inline constexpr std::size_t kWordBytes = 8;

/// Eight bytes of an array of `num_bytes`, filled up with zeros where it ends before.
RINGCOMM_HD inline std::uint64_t load_word(const std::byte* from, std::size_t idx,
                                           std::size_t num_bytes) {
  const std::size_t begin = idx * kWordBytes;
  std::uint64_t word = 0;
  if (begin + kWordBytes <= num_bytes && is_aligned(from, kWordBytes))
    return load_pack<Cached::kYes, std::uint64_t>(from + begin);
  RINGCOMM_ROLLED
  for (std::size_t i = 0; i < kWordBytes && begin + i < num_bytes; ++i)
    word |= std::uint64_t{load_pack<Cached::kYes, std::uint8_t>(from + begin + i)} << (8 * i);
  return word;
}
RINGCOMM_HD inline void store_word(std::byte* to, std::size_t idx, std::size_t num_bytes,
                                   std::uint64_t word) {
  const std::size_t begin = idx * kWordBytes;
  if (begin + kWordBytes <= num_bytes && is_aligned(to, kWordBytes)) {
    store_pack<Cached::kYes>(to + begin, word);
    return;
  }
  RINGCOMM_ROLLED
  for (std::size_t i = 0; i < kWordBytes && begin + i < num_bytes; ++i)
    store_pack<Cached::kYes>(to + begin + i, static_cast<std::uint8_t>(word >> (8 * i)));
}

/// Reduces integers, booleans and float64, which are rarely reduced in bulk. One kernel handles
/// them all and branches on the type for every word.
class AnyReducer {
 public:
  RINGCOMM_HD AnyReducer(DType dtype, Reduction reduction)
      : reduction_(reduction),
        elem_bits_(static_cast<unsigned>(8 * element_bytes(dtype))),
        kind_(dtype == DType::kBool      ? Kind::kBool
              : dtype == DType::kFloat64 ? Kind::kFloat
              : dtype == DType::kInt8 || dtype == DType::kInt16 || dtype == DType::kInt32 ||
                      dtype == DType::kInt64
                  ? Kind::kSigned
                  : Kind::kUnsigned) {}

  RINGCOMM_HD std::size_t elem_bytes() const { return elem_bits_ / 8; }

  // ---- eight bytes of elements

  using Word = std::uint64_t;
  RINGCOMM_HD Word first(std::uint64_t word) const {
    if (kind_ != Kind::kBool) return word;
    // 1 for each byte that has a bit: the carry of an addition that stays within its byte.
    const std::uint64_t low = 0x7f7f7f7f7f7f7f7fu;
    return (((word & low) + low) | word) >> 7 & 0x0101010101010101u;
  }
  RINGCOMM_HD void add(Word& acc, std::uint64_t word) const {
    const std::uint64_t next = first(word);
    if (kind_ == Kind::kFloat) {
      acc =
          bits_as<std::uint64_t>(combined(reduction_, bits_as<double>(acc), bits_as<double>(next)));
    } else if (kind_ == Kind::kBool) {
      // For booleans the sum is "any" and the product "all".
      const bool is_all = reduction_ == Reduction::kProduct || reduction_ == Reduction::kMin ||
                          reduction_ == Reduction::kBitAnd;
      acc = is_all ? acc & next : reduction_ == Reduction::kBitXor ? acc ^ next : acc | next;
    } else {
      acc = by_element(acc, [&](std::uint64_t mine, unsigned shift) {
        const std::uint64_t theirs = element(next, shift);
        return kind_ == Kind::kSigned
                   ? static_cast<std::uint64_t>(combine_ints(static_cast<std::int64_t>(mine),
                                                             static_cast<std::int64_t>(theirs)))
                   : combine_ints(mine, theirs);
      });
    }
  }
  RINGCOMM_HD std::uint64_t result(Word acc, int divisor) const {
    if (kind_ == Kind::kFloat) {
      const auto value = bits_as<double>(acc);
      return bits_as<std::uint64_t>(FloatElement<double>::store(
          divisor > 1 ? FloatElement<double>::divide(value, divisor) : value));
    }
    if (divisor <= 1 || kind_ == Kind::kBool) return acc;
    return by_element(acc, [&](std::uint64_t mine, unsigned) {
      return kind_ == Kind::kSigned
                 ? static_cast<std::uint64_t>(static_cast<std::int64_t>(mine) / divisor)
                 : mine / static_cast<std::uint64_t>(divisor);
    });
  }

  /// outputs[...][i] = sources[0][i] (+) ... by all threads of a block, like ReduceOp::combine.
  /// Both have num() and at(idx).
  template <int kMaxVectors = 8, class B, class To, class Sources>
  RINGCOMM_HD void combine(const B& block, const To& outputs, const Sources& sources,
                           std::size_t num_elems, int divisor) const {
    const std::size_t num_bytes = num_elems * elem_bytes();
    const std::size_t num_words = (num_bytes + kWordBytes - 1) / kWordBytes;
    RINGCOMM_ROLLED
    for (std::size_t i = block.thread_idx(); i < num_words; i += block.num_threads()) {
      Word acc = first(load_word(sources.at(0), i, num_bytes));
      RINGCOMM_ROLLED
      for (int s = 1; s < sources.num(); ++s) add(acc, load_word(sources.at(s), i, num_bytes));
      const std::uint64_t word = result(acc, divisor);
      RINGCOMM_ROLLED
      for (int o = 0; o < outputs.num(); ++o) store_word(outputs.at(o), i, num_bytes, word);
    }
  }

 private:
  enum class Kind : std::uint8_t { kBool, kSigned, kUnsigned, kFloat };

  /// An element in the low bits of 64 bits.
  RINGCOMM_HD std::uint64_t element(std::uint64_t word, unsigned shift) const {
    const unsigned above = 64 - elem_bits_;
    const std::uint64_t high = (word >> shift) << above;
    return kind_ == Kind::kSigned
               ? static_cast<std::uint64_t>(static_cast<std::int64_t>(high) >> above)
               : high >> above;
  }
  template <class F>
  RINGCOMM_HD std::uint64_t by_element(std::uint64_t word, const F& function) const {
    const unsigned above = 64 - elem_bits_;
    std::uint64_t result = 0;
    RINGCOMM_ROLLED
    for (unsigned shift = 0; shift < 64; shift += elem_bits_)
      result |= function(element(word, shift), shift) << above >> above << shift;
    return result;
  }
  template <class T>
  RINGCOMM_HD T combine_ints(T a, T b) const {
    switch (reduction_) {
      case Reduction::kBitAnd:
        return BitAnd::apply(a, b);
      case Reduction::kBitOr:
        return BitOr::apply(a, b);
      case Reduction::kBitXor:
        return BitXor::apply(a, b);
      default:
        return combined(reduction_, a, b);
    }
  }

  Reduction reduction_;
  unsigned elem_bits_;
  Kind kind_;
};

}  // namespace ringcomm::cuda
