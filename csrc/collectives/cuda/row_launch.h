#pragma once

#include <cstdint>
#include <functional>

#include "device/cuda/call.h"
#include "transport/cuda/driver_api.h"

namespace ringcomm::cuda {

/// A kernel of rows that exchanges what it knows of each row with the other ranks, in place of an
/// all_reduce of SoftmaxStats. Its clusters use the packets of as many blocks.
struct RowLaunch {
  std::uint32_t num_clusters = 1;  ///< the same on all ranks, as RowRoom says
  std::uint64_t digest = 0;        ///< of all else that must be the same on all ranks
  std::function<void(const KernelCall& call, StreamHandle stream)> launch;
};

}  // namespace ringcomm::cuda
