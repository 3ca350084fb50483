#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "core/types.h"

namespace ringcomm {

/// The type in which torch computes with elements of ours: unsigned integers of 16 bits and more
/// have the operators of the signed ones.
at::ScalarType scalar_type_of(DType dtype);
/// Elements in device memory that something else owns.
at::Tensor device_array(const void* data, std::size_t num_elems, at::ScalarType type,
                        c10::Device device);

/// Reductions by torch's operators, on any device and in the order of its current stream; the
/// results are those of ReduceOp in reduce/reduce_op.h, except the bits of NaN, which depend on the
/// device.
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
  using Arrays = std::vector<at::Tensor>;

  void combine_truths(const at::Tensor& to, const Arrays& srcs) const;
  void combine_numbers(const at::Tensor& to, const Arrays& srcs, int divisor) const;
  bool is_short_float() const { return dtype_ == DType::kFloat16 || dtype_ == DType::kBFloat16; }
  /// Whether comparisons of the signed type are not those of ours.
  bool needs_flip() const;
  at::Tensor flipped(const at::Tensor& array) const;
  void apply(at::Tensor& to, const at::Tensor& a, const at::Tensor& b) const;
  at::Tensor divided(const at::Tensor& sum, int divisor) const;

  Reduction reduction_;
  DType dtype_;
  c10::Device device_;
};

/// Merges SoftmaxStats, as rows of floats; reduce/softmax_merge.h has the rules. Either may be
/// `to`.
void merge_stats_arrays(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b);

}  // namespace ringcomm
