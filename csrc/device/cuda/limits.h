#pragma once

namespace ringcomm::cuda {

inline constexpr int kMaxRanks = 32;

/// Threads of a block of any kernel. Two such blocks share a multiprocessor at 64 registers a
/// thread.
inline constexpr int kBlockThreads = 512;

}  // namespace ringcomm::cuda
