#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "collectives/collective.h"
#include "cuda/collectives/launch_plan.h"
#include "cuda/kernels/call.h"

namespace ringcomm::cuda {

/// The place at which peers have mapped a buffer of this rank (Lent::place); 0 if they have not.
using PlaceOf = std::function<std::uint64_t(const std::byte* data, std::size_t num_bytes)>;

/// Tells the kernel of a planned call which of this rank's buffers its peers can access directly:
/// the input and the output of an all_reduce and a fused update, and the data for other ranks of
/// every other call. A rank lends all of these or none. It lends no buffer that its own kernel
/// writes while peers would read it, and none in calls so short that staging needs one
/// synchronization and lending two.
void find_lent_buffers(const Collective& call, const LaunchPlan& plan, const PlaceOf& place_of,
                       KernelCall& kernel_call);

}  // namespace ringcomm::cuda
