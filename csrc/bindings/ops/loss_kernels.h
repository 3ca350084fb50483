#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace ringcomm {

/// The options of cross_entropy_and_grad_, as its schema has them.
struct LossKernelOptions {
  std::int64_t num_classes;
  std::int64_t ignore_index;
  double logit_scale;
  double softcap;
  double label_smoothing;
  double z_loss;
  std::string reduction;
  bool wants_more;
};

using LossResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// cross_entropy_and_grad_ by the kernels of device/cuda/loss_rows.h, on the current stream: one
/// read and one write of the logits, two launches. Returns nothing, and changes nothing, if they do
/// not support the call: the GPU has no clusters (before sm_90), ringcomm was built without
/// kernels, rows are too short or too long (plan_loss), logits are float16, or the call has a
/// softcap, label smoothing with class weights, a scale that is not positive, or outputs entropy or
/// accuracy.
///
/// `target` (int64) and `weight` are contiguous. weight has num_classes elements; the logits have
/// at least as many columns.
std::optional<LossResults> cross_entropy_by_clusters(const at::Tensor& logits,
                                                     const at::Tensor& target,
                                                     const std::optional<at::Tensor>& weight,
                                                     const std::optional<at::Tensor>& num_items,
                                                     const LossKernelOptions& options);

/// The same over the ranks of a group that have a shard of the classes each, this one those from
/// `vocab_start` on; options.num_classes are of all ranks. One read and one write of the logits on
/// each, and 16 bytes per row to each peer, inside the kernel. Collective.
///
/// Returns nothing, on all ranks and without changes, if ranks cannot map each other's memory, take
/// turns on a GPU or have no room for kernels that wait, if a rank has no such kernels, and for the
/// options above. Shards may be at most an eighth longer than vocab_size divided by the ranks: a
/// rank with a longer one alone returns nothing, and its different call then raises a MismatchError
/// on all ranks. Shards that do not fit together make all results NaN.
std::optional<LossResults> cross_entropy_over_shards(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& num_items, const std::string& group_name,
    std::int64_t vocab_start, const LossKernelOptions& options);

}  // namespace ringcomm
