#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace ringcomm {

/// cross_entropy_and_grad_ by the kernels of loss_kernels.cu, on the current stream.
/// Returns and changes nothing if they do not support the call: the GPU has no clusters (before
/// sm_90), there are no kernels, rows are too short or too long (plan_loss), logits are float16, or
/// the call has a softcap, label smoothing with class weights, a scale that is not positive, or
/// outputs entropy or accuracy.
///
/// `target` (int64) and `weight` (num_classes elements) are contiguous; the logits have at least as
/// many columns.
std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> cross_entropy_by_clusters(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& num_items, std::int64_t num_classes, std::int64_t ignore_index,
    double logit_scale, double softcap, double label_smoothing, double z_loss,
    const std::string& reduction, bool wants_more);

}  // namespace ringcomm
