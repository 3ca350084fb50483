// The checksum of offloaded data, which a later version must compute again from the same file.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/checksum.h"
#include "third_party/doctest/doctest.h"

using ringcomm::checksum;

namespace {

using Bytes = std::vector<std::uint8_t>;

// CRC-32C, bit by bit, of the bytes and zeros up to a multiple of eight.
std::uint32_t add(std::uint32_t sum, const std::uint8_t* bytes, std::size_t num_bytes) {
  for (std::size_t i = 0; i < (num_bytes + 7) / 8 * 8; ++i) {
    sum ^= i < num_bytes ? bytes[i] : 0;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? 0x82f63b78U : 0);
  }
  return sum;
}

// Of three parts of whole words, which a processor adds up at the same time, and of their length.
std::uint32_t expected(const Bytes& bytes) {
  const std::size_t part = bytes.size() / 24 * 8;
  std::uint32_t sums[3];
  for (std::size_t i = 0; i < 3; ++i)
    sums[i] = add(0xffffffff, bytes.data() + i * part, i < 2 ? part : bytes.size() - 2 * part);
  Bytes last;
  for (const std::uint64_t word :
       {std::uint64_t{sums[2]} | std::uint64_t{sums[1]} << 32, std::uint64_t{bytes.size()}})
    for (int i = 0; i < 8; ++i) last.push_back(static_cast<std::uint8_t>(word >> (8 * i)));
  return add(sums[0], last.data(), last.size());
}

TEST_CASE("a checksum is that of its definition, at every length") {
  Bytes bytes;
  for (std::size_t size = 0; size < 200; ++size) {
    CAPTURE(size);
    CHECK(checksum(bytes.data(), bytes.size()) == expected(bytes));
    bytes.push_back(static_cast<std::uint8_t>(31 * size + 7));
  }
  CHECK(checksum(bytes.data(), 0) == expected({}));
}

}  // namespace
