// How the threads of a block of a GPU move bytes together.
#include <cstdint>
#include <vector>

#include "cuda/kernels/memory.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm::cuda;

// One of several threads, which run one after the other.
struct OneOfThreads {
  unsigned idx, num;
  unsigned thread_idx() const { return idx; }
  unsigned num_threads() const { return num; }
};

TEST_CASE("copies as one list: every vector of every copy has one place") {
  for (const std::uint32_t stride : {1u, 2u, 3u, 7u, 64u, 513u, 2048u, 8191u, 65'536u, 1'000'003u})
    for (const int num : {1, 2, 3, 7, 31}) {
      std::vector<Copy> copies(static_cast<std::size_t>(num));
      for (int k = 0; k < num; ++k) {
        // Addresses are never followed here.
        auto* base = reinterpret_cast<std::byte*>((std::uintptr_t{1} << 40) * (1 + k));
        copies[static_cast<std::size_t>(k)] = {base, base, 0, k % 3 == 1 ? stride / 2 : stride};
      }
      const CopyList list(copies.data(), num,
                          CopyList::stride_of(std::size_t{stride} * sizeof(Vector)));
      REQUIRE(list.num_vectors() == stride * static_cast<unsigned>(num));
      bool are_right = true;
      const auto check = [&](std::uint32_t idx) {
        const auto place = list.at(idx);
        const std::uint32_t k = idx / stride;
        const std::uint32_t vector = idx % stride;
        const bool is_there = k < copies.size() && vector < copies[k].num_vectors;
        are_right = are_right && place.is_there == is_there &&
                    (!is_there || place.from == copies[k].from + std::size_t{vector} * 16);
      };
      for (std::uint32_t idx = 0; idx < std::min(list.num_vectors() + 3000, 100'000u); ++idx)
        check(idx);
      // Where a rounded inverse would give the wrong quotient first.
      for (std::uint32_t k = 1; k <= static_cast<unsigned>(num); ++k)
        for (std::uint32_t off = 0; off < 3; ++off) check(k * stride - 1 + off);
      CHECK(are_right);
    }
}

TEST_CASE("a block copies any length between any addresses, and nothing beside") {
  std::vector<std::byte> from(3000), to(3000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (const std::size_t num_bytes : {0, 1, 3, 15, 16, 17, 64, 1000, 2500})
    for (const std::size_t to_offset : {0, 1, 4, 16})
      for (const std::size_t from_offset : {0, 2, 4, 16})
        for (const unsigned num_threads : {1u, 3u, 64u}) {
          std::fill(to.begin(), to.end(), std::byte{0});
          for (unsigned i = 0; i < num_threads; ++i)
            copy_by_block(OneOfThreads{i, num_threads}, to.data() + to_offset,
                          from.data() + from_offset, num_bytes);
          bool are_right = true;
          for (std::size_t i = 0; i < to.size(); ++i) {
            const bool is_inside = i >= to_offset && i < to_offset + num_bytes;
            are_right = are_right &&
                        to[i] == (is_inside ? from[from_offset + i - to_offset] : std::byte{0});
          }
          CHECK(are_right);
        }
}

}  // namespace
