#include "kernels/losses/cuda_cross_entropy.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <vector>

#include "kernels/cuda_device.h"
#include "kernels/losses/loss_call.h"
#include "kernels/torch_checks.h"

RINGCOMM_EMBED(loss_kernels)

namespace ringcomm {
namespace {

using cuda::LaunchAttribute;
using cuda::LaunchConfig;
using cuda::LossCall;
using cuda::LossPlan;

// Of clusters of so many blocks; sets `cluster`, which must live as long.
LaunchConfig config_of(unsigned num_clusters, unsigned cluster_blocks, unsigned shared_bytes,
                       LaunchAttribute& cluster, cuda::StreamHandle stream) {
  cluster.id = cuda::kClusterDimension;
  std::fill_n(cluster.value.cluster, 3, 1U);
  cluster.value.cluster[0] = cluster_blocks;
  return {.grid = {num_clusters * cluster_blocks, 1, 1},
          .block = {cuda::kLossThreads, 1, 1},
          .shared_bytes = shared_bytes,
          .stream = stream,
          .attributes = &cluster,
          .num_attributes = 1};
}

/// The kernels of losses on a GPU: loaded by their first call, and kept.
class LossKernels : public cuda::PerDevice<LossKernels> {
 public:
  /// Of a plan, as many as the GPU runs at the same time; 0 if it has no room or no such kernels.
  int num_clusters(const LossPlan& plan) const {
    return num_clusters_[static_cast<std::size_t>(std::countr_zero(plan.cluster_blocks))];
  }
  /// Both kernels of a call: that of the rows, and the sum.
  void launch(const LossPlan& plan, LossCall& call, bool is_float, const c10::Stream& stream) const;

 private:
  friend PerDevice;
  explicit LossKernels(cuda::DeviceOrdinal device) {
    const cuda::ContextGuard guard(device);
    // Loading may wait for the device; nothing of it is for a capture.
    const cuda::RelaxedCapture relaxed;
    const std::vector<cuda::Module> modules = cuda::load_kernels({RINGCOMM_IMAGE(loss_kernels)});
    const auto find = [&](const char* name) { return cuda::find_kernel(modules, name); };
    rows_ = {{{find("ringcomm_loss_rows_bfloat16"), find("ringcomm_smooth_loss_rows_bfloat16")},
              {find("ringcomm_loss_rows_float32"), find("ringcomm_smooth_loss_rows_float32")}}};
    sum_ = find("ringcomm_sum_losses");
    // Images for GPUs before sm_90 have none of them.
    if (sum_ != nullptr) find_room();
  }

  /// More than 48 KiB of shared memory must be requested, and some GPUs have less.
  void find_room() {
    constexpr unsigned kMostBytes =
        LossPlan{.segment_vectors = cuda::kLossThreads * cuda::kVectorsPerThread}.shared_bytes();
    for (const auto& of_type : rows_)
      for (const cuda::Function kernel : of_type)
        if (cuda::driver().func_set_attribute(kernel, cuda::kMaxDynamicSharedBytes,
                                              static_cast<int>(kMostBytes)) != cuda::kSuccess)
          return;
    for (std::size_t i = 0; i < num_clusters_.size(); ++i) {
      LaunchAttribute cluster = {};
      const LaunchConfig config = config_of(1, 1U << i, kMostBytes, cluster, nullptr);
      if (cuda::driver().occupancy_max_active_clusters(&num_clusters_[i], rows_[0][1], &config) !=
          cuda::kSuccess)
        num_clusters_[i] = 0;
    }
  }

  std::array<std::array<cuda::Function, 2>, 2> rows_ = {};  // of floats; with smoothing
  cuda::Function sum_ = nullptr;
  std::array<int, 4> num_clusters_ = {};  // of 1, 2, 4 and 8 blocks
};

void LossKernels::launch(const LossPlan& plan, LossCall& call, bool is_float,
                         const c10::Stream& stream) const {
  const cuda::ContextGuard guard(stream.device_index());
  const auto most = static_cast<std::int64_t>(num_clusters(plan));
  const auto num_used = static_cast<unsigned>(std::min(call.num_tokens, most));
  LaunchAttribute cluster = {};
  const LaunchConfig config =
      config_of(num_used, plan.cluster_blocks, plan.shared_bytes(), cluster, handle_of(stream));
  void* parameters[] = {&call};
  const cuda::Function rows = rows_[is_float][call.label_smoothing != 0];
  cuda::check(cuda::driver().launch_kernel_ex(&config, rows, parameters, nullptr),
              "launch a kernel of losses");
  cuda::check(
      cuda::driver().launch_kernel(sum_, 1, 1, 1, cuda::kLossThreads, 1, 1, cuda::kLossSharedBytes,
                                   config.stream, parameters, nullptr),
      "launch a kernel of losses");
}

bool is_supported(const at::Tensor& logits) {
  const bool is_type = logits.scalar_type() == at::kBFloat16 || logits.scalar_type() == at::kFloat;
  return has_driver_for(logits.device()) && is_type && logits.dim() == 2 && logits.size(0) > 0 &&
         logits.stride(1) == 1;
}

bool is_aligned(const at::Tensor& logits) {
  const auto element_bytes = static_cast<std::uintptr_t>(logits.element_size());
  const auto stride = static_cast<std::uintptr_t>(logits.stride(0)) * element_bytes;
  const auto width = static_cast<std::uintptr_t>(logits.size(1)) * element_bytes;
  const auto begin = reinterpret_cast<std::uintptr_t>(logits.const_data_ptr());
  return (begin | stride | width) % cuda::kVectorBytes == 0;
}

/// Sets the divisor of the losses. Keep the tensor that it returns until the kernels are launched.
at::Tensor set_divisor(LossCall& call, const std::optional<at::Tensor>& num_items,
                       const std::string& reduction, c10::Device device) {
  at::Tensor on_device;
  if (reduction != "mean") return on_device;
  if (!num_items.has_value()) {
    call.counts_targets = true;
  } else if (num_items->device() == device) {
    on_device = num_items->detach().reshape({}).to(at::kDouble);
    call.num_items = on_device.const_data_ptr<double>();
  } else {
    call.divisor = num_items->item().toDouble();
  }
  return on_device;
}

}  // namespace

std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> cross_entropy_by_clusters(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& num_items, std::int64_t num_classes, std::int64_t ignore_index,
    double logit_scale, double softcap, double label_smoothing, double z_loss,
    const std::string& reduction, bool wants_more) {
  const bool is_smooth_weighted = weight.has_value() && label_smoothing != 0;
  if (!is_supported(logits) || softcap != 0 || !(logit_scale >= FLT_MIN) || is_smooth_weighted ||
      wants_more || reduction == "none")
    return std::nullopt;
  const auto plan = cuda::plan_loss(logits.size(1) * logits.element_size(), is_aligned(logits));
  if (!plan.has_value()) return std::nullopt;
  const c10::DeviceGuard device_guard(logits.device());
  const LossKernels& kernels = LossKernels::of(logits.device().index());
  if (kernels.num_clusters(*plan) == 0) return std::nullopt;

  const auto floats = logits.options().dtype(at::kFloat);
  const at::Tensor by_token = at::empty({4, logits.size(0)}, floats);
  const at::Tensor loss = at::empty({}, floats);
  const at::Tensor denominator = at::empty({}, floats.dtype(at::kDouble));
  LossCall call{.logits = static_cast<std::byte*>(logits.mutable_data_ptr()),
                .targets = target.const_data_ptr<std::int64_t>(),
                .class_weights = weight.has_value() ? weight->const_data_ptr<float>() : nullptr,
                .by_token = by_token.mutable_data_ptr<float>(),
                .denominator = denominator.mutable_data_ptr<double>(),
                .loss = loss.mutable_data_ptr<float>(),
                .num_tokens = logits.size(0),
                .row_stride_bytes = logits.stride(0) * logits.element_size(),
                .ignore_index = ignore_index,
                .width = static_cast<std::int32_t>(logits.size(1)),
                .num_classes = static_cast<std::int32_t>(num_classes),
                .segment_vectors = plan->segment_vectors,
                .logit_scale = static_cast<float>(logit_scale),
                .label_smoothing = static_cast<float>(label_smoothing),
                .z_loss = static_cast<float>(z_loss)};
  const at::Tensor kept = set_divisor(call, num_items, reduction, logits.device());
  const c10::impl::VirtualGuardImpl streams(logits.device().type());
  kernels.launch(*plan, call, logits.scalar_type() == at::kFloat,
                 streams.getStream(logits.device()));
  mark_written(logits);
  return std::tuple(loss, by_token, denominator);
}

}  // namespace ringcomm
