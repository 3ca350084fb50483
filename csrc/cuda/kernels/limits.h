#pragma once

namespace ringcomm::cuda {

inline constexpr int kMaxRanks = 32;

/// Threads of a block of any kernel.
inline constexpr int kBlockThreads = 512;

/// Blocks of any kernel of a group that share a multiprocessor: launch bounds leave a thread 64
/// registers. What fits a GPU is counted with it, and it is checked where kernels are loaded.
inline constexpr int kBlocksPerMultiprocessor = 2;

}  // namespace ringcomm::cuda
