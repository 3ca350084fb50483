#pragma once

#include <optional>

#include "collectives/collective.h"
#include "collectives/messages/shares.h"
#include "collectives/ring.h"
#include "cuda/collectives/kernels.h"
#include "cuda/messages/engine.h"

namespace ringcomm {

/// Collectives of device tensors over another backend, all in the order of the current stream.
///
/// The ring is this library's own. All else moves bytes by the backend's collectives, which know
/// its network, and reduces here: so all types have the sums of the CPU, in the order of the ranks.

/// Every rank gets the whole buffers of all, and reduces everything.
void device_one_shot_all_reduce(DeviceEngine& engine, const Collective& call);
/// Every rank gets the inputs of its chunk, and reduces them.
void device_reduce_scatter(DeviceEngine& engine, const Collective& call,
                           const MessageShares& shares);
/// This rank's own chunk is already in its output.
void device_all_gather(DeviceEngine& engine, const MessageShares& shares);
void device_broadcast(DeviceEngine& engine, const Collective& call);
void device_gather(DeviceEngine& engine, const Collective& call);
void device_scatter(DeviceEngine& engine, const Collective& call);
/// May be in place.
void device_all_to_all(DeviceEngine& engine, const Collective& call);
void device_barrier(DeviceEngine& engine);

/// Around the ring of collectives/ring.h.
void device_ring(DeviceEngine& engine, const Collective& call, const MessageShares& shares,
                 const RingHalves& halves);

/// The optimizer's step of reduce_scatter_update_all_gather on this rank's chunk: by ringcomm's
/// kernel where it has one for the device, and by torch's operators where not.
class DeviceUpdate {
 public:
  explicit DeviceUpdate(c10::Device device) : device_(device) {}

  /// `grad` is reduced, and `param` where the call has the chunk. In the order of the current
  /// stream. Formulas and order are those of reduce/update_op.h; only the kernel has their bits.
  void run(const Collective& call, const void* grad, void* param, std::size_t num_elems);

 private:
  c10::Device device_;
  std::optional<const cuda::Kernels*> kernels_;  // once they were looked for; null: there are none
};

}  // namespace ringcomm
