#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"

// How the threads of a block move bytes together.

namespace ringcomm::cuda {

/// What one load or store moves at most.
struct alignas(16) Vector {
  std::uint32_t words[4];
};

RINGCOMM_HD inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

/// Units of a range, dealt to the threads of a block; `kUnroll` loads are under way at once.
template <class Unit, int kUnroll, class B>
RINGCOMM_HD void copy_units(const B& block, std::byte* to, const std::byte* from,
                            std::size_t num_units) {
  auto* out = reinterpret_cast<Unit*>(to);
  const auto* in = reinterpret_cast<const Unit*>(from);
  const std::size_t stride = block.num_threads();
  std::size_t i = block.thread_idx();
  for (; i + (kUnroll - 1) * stride < num_units; i += kUnroll * stride) {
    Unit loaded[kUnroll];
    for (int u = 0; u < kUnroll; ++u) loaded[u] = in[i + u * stride];
    for (int u = 0; u < kUnroll; ++u) out[i + u * stride] = loaded[u];
  }
  for (; i < num_units; i += stride) out[i] = in[i];
}

/// memcpy by all threads of a block; what they wrote is for others to read after a sync.
template <class B>
RINGCOMM_HD void copy_by_block(const B& block, void* to, const void* from, std::size_t num_bytes) {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  std::size_t done = 0;
  if (is_aligned(out, sizeof(Vector)) && is_aligned(in, sizeof(Vector))) {
    copy_units<Vector, 4>(block, out, in, num_bytes / sizeof(Vector));
    done = num_bytes / sizeof(Vector) * sizeof(Vector);
  } else if (is_aligned(out, 4) && is_aligned(in, 4)) {
    copy_units<std::uint32_t, 4>(block, out, in, num_bytes / 4);
    done = num_bytes / 4 * 4;
  }
  copy_units<std::byte, 4>(block, out + done, in + done, num_bytes - done);
}

}  // namespace ringcomm::cuda
