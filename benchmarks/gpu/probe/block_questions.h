#pragma once

// Where blocks run, and in clusters.

#include <algorithm>
#include <array>
#include <bit>

#include "gpu/probe/gpu.h"
#include "gpu/probe/pair.h"

namespace ringcomm::probe {

/// A process that has waited so long did not have the GPU.
inline constexpr std::uint64_t kTimeSliceUs = 500;

/// Kernels of both processes at the same time: where their blocks are.
inline void multiprocessors(Side& side, Gpu& gpu) {
  const auto role = static_cast<std::size_t>(side.role());
  Page& page = side.page;
  const int num_all = gpu.attribute(cuda::kMultiprocessorCount);
  const unsigned num_blocks = std::min(static_cast<unsigned>(num_all), Words::kMaxBlocks);
  side.meet();
  gpu.start_hold(num_blocks);
  gpu.finish();
  page.ran[role] = {UINT64_MAX, 0, 0};
  for (unsigned i = 0; i < num_blocks; ++i) {
    const Words::Block block = gpu.block(i);
    const std::uint64_t place = block.multiprocessor;
    page.multiprocessors[role][place / 64 % 8] |= std::uint64_t{1} << place % 64;
    page.ran[role][0] = std::min(page.ran[role][0], block.began_ns);
    page.ran[role][1] = std::max(page.ran[role][1], block.ended_ns);
    page.ran[role][2] = std::max(page.ran[role][2], block.number);
  }
  side.meet();
  if (side.exports()) return side.meet();
  std::array<int, 3> counts = {};
  for (std::size_t i = 0; i < 8; ++i) {
    const auto& [theirs, ours] = page.multiprocessors;
    counts[0] += std::popcount(theirs[i]);
    counts[1] += std::popcount(ours[i]);
    counts[2] += std::popcount(theirs[i] & ours[i]);
  }
  const auto& [first, second] = page.ran;
  const bool overlaps = first[0] < second[1] && second[0] < first[1];
  const std::uint64_t pause_us = std::max(first[2], second[2]) / 1000;
  const std::string when = !overlaps                 ? "one after the other"
                           : pause_us < kTimeSliceUs ? "at the same time"
                                                     : "in time slices";
  side.answer(std::to_string(counts[0]) + " and " + std::to_string(counts[1]) + " of " +
              std::to_string(num_all) + ", " + std::to_string(counts[2]) + " in common, " + when +
              ", longest pause " + std::to_string(pause_us) + " us");
  side.meet();
}

/// The driver's answer to a launch of `num_blocks` in clusters; each notes what it finds.
inline cuda::Result run_clusters(Gpu& gpu, unsigned num_blocks, unsigned cluster_blocks) {
  cuda::LaunchAttribute attribute = {.id = cuda::kClusterDimension, .value = {}};
  std::fill_n(attribute.value.cluster, 3, 1u);
  attribute.value.cluster[0] = cluster_blocks;
  const cuda::LaunchConfig config = {{num_blocks, 1, 1}, {1, 1, 1}, 0, gpu.stream(), &attribute, 1};
  Work work = gpu.work(0);
  void* parameters[] = {&work};
  const cuda::Function cluster = gpu.load(kClusterPtx, "probe_cluster");
  const auto result = cuda::driver().launch_kernel_ex(&config, cluster, parameters, nullptr);
  return result == cuda::kSuccess ? cuda::driver().stream_synchronize(gpu.stream()) : result;
}

/// Clusters of blocks, which cross-entropy uses.
inline void clusters(Side& side, Gpu& gpu) {
  if (side.exports()) return side.meet();
  constexpr unsigned kBlocks = 16;
  std::string text;
  for (const unsigned size : {1u, 2u, 4u, 8u}) {
    side.step("a launch with clusters");
    const cuda::Result result = run_clusters(gpu, kBlocks, size);
    bool is_right = true;
    for (unsigned i = 0; i < kBlocks; ++i) is_right = is_right && gpu.block(i).number == size;
    text += (text.empty() ? "" : ", ") + std::to_string(size) + " blocks: " +
            (result != cuda::kSuccess ? name_of(result)
             : is_right               ? "run"
                                      : "wrong");
  }
  side.answer(text);
  side.meet();
}

}  // namespace ringcomm::probe
