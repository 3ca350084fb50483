#include "kernels/checksum.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace ringcomm {
namespace {

// Castagnoli's polynomial, reflected.
constexpr std::uint32_t kPolynomial = 0x82f63b78;

constexpr std::array<std::uint32_t, 256> kByBits = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    table[byte] = byte;
    for (int bit = 0; bit < 8; ++bit)
      table[byte] = (table[byte] >> 1) ^ ((table[byte] & 1) != 0 ? kPolynomial : 0);
  }
  return table;
}();

struct ByTable {
  static std::uint64_t add(std::uint64_t sum, std::uint64_t word) {
    for (int i = 0; i < 8; ++i, word >>= 8) sum = (sum >> 8) ^ kByBits[(sum ^ word) & 0xff];
    return sum;
  }
};

template <class Crc>
[[gnu::always_inline]] inline std::uint32_t sum_of(const std::byte* data, std::size_t num_bytes) {
  const auto word_at = [](const std::byte* place, std::size_t num = 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, place, num);
    return word;
  };
  const std::size_t part = num_bytes / 24 * 8;
  std::uint64_t sums[3] = {0xffffffff, 0xffffffff, 0xffffffff};
  for (std::size_t at = 0; at < part; at += 8)
    for (std::size_t i = 0; i < 3; ++i) sums[i] = Crc::add(sums[i], word_at(data + i * part + at));
  for (std::size_t at = 3 * part; at < num_bytes; at += 8)
    sums[2] = Crc::add(sums[2], word_at(data + at, std::min<std::size_t>(8, num_bytes - at)));
  return static_cast<std::uint32_t>(
      Crc::add(Crc::add(sums[0], sums[1] << 32 | sums[2]), num_bytes));
}

#if defined(__x86_64__)
struct ByInstruction {
  [[gnu::target("sse4.2")]] static std::uint64_t add(std::uint64_t sum, std::uint64_t word) {
    return _mm_crc32_u64(sum, word);
  }
};

[[gnu::target("sse4.2"), gnu::flatten]] std::uint32_t sum_by_instruction(const std::byte* data,
                                                                         std::size_t num_bytes) {
  return sum_of<ByInstruction>(data, num_bytes);
}
#endif

}  // namespace

std::uint32_t checksum(const void* data, std::size_t num_bytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return sum_by_instruction(bytes, num_bytes);
#endif
  return sum_of<ByTable>(bytes, num_bytes);
}

}  // namespace ringcomm
