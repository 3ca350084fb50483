#pragma once

#include <cstdint>
#include <functional>

#include "device/cuda/call.h"
#include "transport/cuda/driver_api.h"

namespace ringcomm::cuda {

/// A row kernel that exchanges its partial result of each row with the other ranks, instead of an
/// all_reduce of SoftmaxStats. Each cluster uses the packets of one block.
struct RowLaunch {
  std::uint32_t num_clusters = 1;  ///< the same on all ranks, from RowRoom
  std::uint64_t digest = 0;        ///< of all else that must be the same on all ranks
  std::function<void(const KernelCall& call, StreamHandle stream)> launch;
};

}  // namespace ringcomm::cuda
