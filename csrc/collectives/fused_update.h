#pragma once

#include <cstddef>
#include <functional>

#include "collectives/call.h"
#include "core/chunk_layout.h"
#include "kernels/updates/update_op.h"

namespace ringcomm {

/// The update of a chunk by its owner in reduce_scatter_update_all_gather; all algorithms use it.
/// It reduces gradients, and updates parameters and state while the result is in the innermost
/// cache. The reduced gradient is never stored elsewhere.
///
/// The reduced gradient is rounded to its dtype in between, so that the result is that of a
/// reduce_scatter followed by the update, to the last bit.
class OwnerUpdate {
 public:
  /// `call` must live as long, and its state be that of `rank`'s chunk.
  OwnerUpdate(const Collective& call, int rank, int world_size);

  /// Reduces `num_srcs` arrays of gradients left to right, divides if the call averages, and
  /// updates the elements `elems` of the call's buffer (this rank's own) that they belong to. The
  /// new parameters go to the call's output, and to `also_to` unless that is null. From any number
  /// of threads, for different elements.
  void run(const void* const* srcs, int num_srcs, const ElemRange& elems, std::byte* also_to) const;

  std::size_t param_bytes() const { return param_bytes_; }  ///< of one element
  const ElemRange& own() const { return own_; }

 private:
  const Collective& call_;
  const ReduceOp& reduce_op_;
  UpdateOp update_op_;
  int divisor_;
  ElemRange own_;
  std::size_t grad_bytes_;
  std::size_t param_bytes_;
};

/// reduce_scatter_update_all_gather as a reduce_scatter, the update, and an all_gather, for
/// transports that know no update: `run` carries out a collective of uneven shards. Equal to the
/// fused form to the last bit where that reduces in the same order.
Traffic update_in_parts(const Collective& call, int rank, int world_size,
                        const std::function<Traffic(const Collective&)>& run);
/// The same on any device: `reduced` has room for this rank's chunk of gradients, which `update`
/// uses.
Traffic update_in_parts(const Collective& call, int rank, int world_size, void* reduced,
                        const std::function<void()>& update,
                        const std::function<Traffic(const Collective&)>& run);

}  // namespace ringcomm
