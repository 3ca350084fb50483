#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "collectives/call.h"
#include "cuda/collectives/kernels.h"

// Reductions by torch's operators, on any device and in the order of its current stream.

namespace ringcomm {

/// Elements in device memory that something else owns.
at::Tensor device_array(const void* data, std::size_t num_elems, at::ScalarType type,
                        c10::Device device);

/// The results are those of ReduceOp in reduce/reduce_op.h, except the bits of NaN, which depend on
/// the device.
class DeviceReduceOp {
 public:
  /// As a call that has been checked has them.
  DeviceReduceOp(Reduction reduction, DType dtype, c10::Device device)
      : reduction_(reduction), dtype_(dtype), device_(device) {}

  /// Reduces one or more arrays left to right, then divides by `divisor`. `to` may be one of
  /// `srcs`.
  void combine(void* to, const std::vector<const void*>& srcs, std::size_t num_elems,
               int divisor) const;

 private:
  /// Whether comparisons of the signed type are not those of ours: the sign bit is flipped then.
  bool needs_flip() const;
  /// In a type in which torch computes as we do.
  at::Tensor readable(const at::Tensor& array) const;
  at::Tensor divided(const at::Tensor& sum, int divisor) const;

  Reduction reduction_;
  DType dtype_;
  c10::Device device_;
};

/// The kernels of update_chunk(). Throws Error, NotImplementedError where the device has none.
const cuda::Kernels& update_kernels(c10::Device device);
/// The optimizer's step of reduce_scatter_update_all_gather on this rank's chunk, by ringcomm's
/// kernel. `grad` is reduced, and `param` where the call has the chunk.
void update_chunk(const Collective& call, const void* grad, void* param, std::size_t num_elems,
                  c10::Device device);

}  // namespace ringcomm
