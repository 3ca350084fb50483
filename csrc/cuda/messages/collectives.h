#pragma once

#include "collectives/collective.h"
#include "collectives/messages/shares.h"
#include "collectives/ring.h"
#include "cuda/messages/engine.h"

namespace ringcomm {

/// Sets the algorithm of `header` from values that are equal on all ranks.
void plan_device_collective(int world_size, const Collective& call,
                            const CommunicatorOptions& options, CallHeader& header);

/// Runs any collective of device tensors over another backend, in the order of the current stream.
/// Afterwards all its batches have been waited for.
///
/// The ring is this library's own. All else moves bytes by the backend's collectives, which know
/// its network, and reduces here: so all types have the sums of the CPU, in the order of the ranks.
void run_device_collective(DeviceEngine& engine, const Collective& call, Algorithm algorithm,
                           const CommunicatorOptions& options);

/// Around the ring of collectives/ring.h.
void device_ring(DeviceEngine& engine, const Collective& call, const MessageShares& shares,
                 const RingHalves& halves);

}  // namespace ringcomm
