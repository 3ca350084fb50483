// How threads of a GPU move bytes together.
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

TEST_CASE("threads copy any length between any addresses, and nothing beside") {
  std::vector<std::byte> from(3000), to(3000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (const std::size_t num_bytes : {0, 1, 3, 15, 16, 17, 64, 1000, 2500})
    for (const std::size_t to_offset : {0, 1, 4, 16})
      for (const std::size_t from_offset : {0, 2, 4, 16})
        for (const unsigned num_threads : {1u, 3u, 64u}) {
          std::fill(to.begin(), to.end(), std::byte{0});
          for (unsigned i = 0; i < num_threads; ++i)
            copy_by_threads(OneOfThreads{i, num_threads}, to.data() + to_offset,
                            from.data() + from_offset, static_cast<std::uint32_t>(num_bytes));
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
