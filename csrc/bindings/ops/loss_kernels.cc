#include "bindings/ops/loss_kernels.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <memory>
#include <string>
#include <utility>

#include "bindings/driver_device.h"
#include "bindings/ops/op_support.h"
#include "bindings/softmax_stats.h"
#include "collectives/cuda/row_launch.h"
#include "device/cuda/image.h"
#include "device/cuda/loss_call.h"
#include "device/cuda/shard_loss_call.h"
#include "transport/cuda/driver.h"
#include "transport/cuda/kernel_modules.h"
#include "transport/cuda/per_device.h"

namespace ringcomm {
namespace {

using cuda::LaunchAttribute;
using cuda::LaunchConfig;
using cuda::LossCall;
using cuda::LossPlan;
using cuda::ShardLossCall;
using cuda::ShardLossPlan;

LaunchAttribute cluster_of(unsigned num_blocks) {
  LaunchAttribute attribute{.id = cuda::kClusterDimension, .value = {}};
  attribute.value.cluster[0] = num_blocks;
  attribute.value.cluster[1] = attribute.value.cluster[2] = 1;
  return attribute;
}

LaunchConfig config_of(unsigned num_blocks, unsigned shared_bytes, LaunchAttribute& cluster,
                       cuda::StreamHandle stream) {
  return {.grid = {num_blocks, 1, 1},
          .block = {cuda::kLossThreads, 1, 1},
          .shared_bytes = shared_bytes,
          .stream = stream,
          .attributes = &cluster,
          .num_attributes = 1};
}

/// The kernels of losses on a GPU: loaded by their first call there, and kept.
class LossKernels {
 public:
  static const LossKernels& of(cuda::DeviceOrdinal device) {
    return cuda::per_device<const LossKernels>(
        device, [&] { return std::unique_ptr<const LossKernels>(new LossKernels(device)); });
  }

  /// The number of a plan's clusters that the GPU runs at the same time; 0 if it has no room or no
  /// such kernels.
  int num_clusters(const LossPlan& plan) const {
    return num_clusters_[static_cast<std::size_t>(std::countr_zero(plan.cluster_blocks))];
  }
  int num_shard_clusters(unsigned cluster_blocks) const {
    return num_shard_clusters_[static_cast<std::size_t>(std::countr_zero(cluster_blocks))];
  }
  cuda::Function rows(bool is_float, bool smooths) const { return rows_[is_float][smooths]; }
  cuda::Function shard_rows(bool is_float, bool smooths) const {
    return shard_rows_[is_float][smooths];
  }
  cuda::Function sum() const { return sum_; }

 private:
  explicit LossKernels(cuda::DeviceOrdinal device) {
    if (!cuda::has_driver()) return;
    const cuda::ContextGuard guard(device);
    // Loading may wait for the device; nothing of it is for a capture.
    const cuda::RelaxedCapture relaxed;
    const cuda::KernelModules modules(cuda::loss_kernel_images());
    rows_ = {{{modules.find("ringcomm_loss_rows_bfloat16"),
               modules.find("ringcomm_smooth_loss_rows_bfloat16")},
              {modules.find("ringcomm_loss_rows_float32"),
               modules.find("ringcomm_smooth_loss_rows_float32")}}};
    shard_rows_ = {{{modules.find("ringcomm_shard_loss_rows_bfloat16"),
                     modules.find("ringcomm_smooth_shard_loss_rows_bfloat16")},
                    {modules.find("ringcomm_shard_loss_rows_float32"),
                     modules.find("ringcomm_smooth_shard_loss_rows_float32")}}};
    sum_ = modules.find("ringcomm_sum_losses");
    // Images for GPUs before sm_90 have none of them.
    if (sum_ == nullptr) return;
    find_room(rows_, kMostBytes, num_clusters_);
    find_room(shard_rows_, kMostShardBytes, num_shard_clusters_);
  }

  using ByOption = std::array<std::array<cuda::Function, 2>, 2>;  // of floats; with smoothing
  using BySize = std::array<int, 4>;                              // of 1, 2, 4 and 8 blocks

  static constexpr unsigned kMostBytes =
      LossPlan{.segment_vectors = cuda::kLossThreads * cuda::kVectorsPerThread}.shared_bytes();
  static constexpr unsigned kMostShardBytes = ShardLossPlan::shared_bytes(cuda::kMaxShardVectors);

  /// More than 48 KiB of shared memory must be requested, and some GPUs have less.
  static void find_room(const ByOption& kernels, unsigned num_bytes, BySize& num_clusters) {
    for (const auto& of_type : kernels)
      for (const cuda::Function kernel : of_type)
        if (cuda::driver().func_set_attribute(kernel, cuda::kMaxDynamicSharedBytes,
                                              static_cast<int>(num_bytes)) != cuda::kSuccess)
          return;
    for (std::size_t i = 0; i < num_clusters.size(); ++i) {
      LaunchAttribute cluster = cluster_of(1U << i);
      const LaunchConfig config = config_of(1U << i, num_bytes, cluster, nullptr);
      if (cuda::driver().occupancy_max_active_clusters(&num_clusters[i], kernels[0][1], &config) !=
          cuda::kSuccess)
        num_clusters[i] = 0;
    }
  }

  ByOption rows_ = {};
  ByOption shard_rows_ = {};
  cuda::Function sum_ = nullptr;
  BySize num_clusters_ = {};
  BySize num_shard_clusters_ = {};
};

/// The requirements of all calls. It checks nothing that may differ between ranks, because all
/// ranks with shards must choose the same path.
bool has_kernels_for(const at::Tensor& logits, const std::optional<at::Tensor>& weight,
                     const LossKernelOptions& options) {
  const bool is_type = logits.scalar_type() == at::kBFloat16 || logits.scalar_type() == at::kFloat;
  const bool is_smooth_weighted = weight.has_value() && options.label_smoothing != 0;
  return is_of_driver(logits.device()) && is_type && logits.dim() == 2 && logits.size(0) > 0 &&
         options.softcap == 0 && options.logit_scale >= FLT_MIN && !is_smooth_weighted &&
         !options.wants_more && options.reduction != "none";
}

bool is_aligned(const at::Tensor& logits) {
  const auto is_multiple = [](std::int64_t bytes) { return bytes % cuda::kVectorBytes == 0; };
  const std::int64_t element_bytes = logits.element_size();
  return is_multiple(static_cast<std::int64_t>(
             reinterpret_cast<std::uintptr_t>(logits.const_data_ptr()) % cuda::kVectorBytes)) &&
         is_multiple(logits.stride(0) * element_bytes) &&
         is_multiple(logits.size(1) * element_bytes);
}

/// Sets the divisor of the losses. Returns a tensor that the kernels read; keep it until then.
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

/// Both kernels of a call: that of the rows, and the sum.
void launch(const LossKernels& kernels, cuda::Function rows, LaunchConfig config, void* parameter,
            LossCall& call) {
  void* parameters[] = {parameter};
  cuda::check(cuda::driver().launch_kernel_ex(&config, rows, parameters, nullptr),
              "launch a kernel of losses");
  parameters[0] = &call;
  cuda::check(
      cuda::driver().launch_kernel(kernels.sum(), 1, 1, 1, cuda::kLossThreads, 1, 1,
                                   cuda::kLossHeadingBytes, config.stream, parameters, nullptr),
      "launch a kernel of losses");
}

void launch(const LossKernels& kernels, const LossPlan& plan, LossCall& call, bool is_float,
            const c10::Stream& stream) {
  const cuda::ContextGuard guard(stream.device_index());
  const auto most = static_cast<std::int64_t>(kernels.num_clusters(plan));
  const auto num_clusters = static_cast<unsigned>(std::min(call.num_tokens, most));
  LaunchAttribute cluster = cluster_of(plan.cluster_blocks);
  const LaunchConfig config = config_of(num_clusters * plan.cluster_blocks, plan.shared_bytes(),
                                        cluster, handle_of(stream));
  launch(kernels, kernels.rows(is_float, call.label_smoothing != 0), config, &call, call);
}

/// A call's tensors, and all of it but what is of its rows and classes.
struct LossTensors {
  at::Tensor by_token, loss, denominator;
  at::Tensor kept;  // read by the kernels
  LossCall call;

  LossTensors(const at::Tensor& logits, const at::Tensor& target,
              const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& num_items,
              const LossKernelOptions& options)
      : by_token(at::empty({4, logits.size(0)}, logits.options().dtype(at::kFloat))),
        loss(at::empty({}, logits.options().dtype(at::kFloat))),
        denominator(at::empty({}, logits.options().dtype(at::kDouble))),
        call{.logits = static_cast<std::byte*>(logits.mutable_data_ptr()),
             .targets = target.const_data_ptr<std::int64_t>(),
             .class_weights = weight.has_value() ? weight->const_data_ptr<float>() : nullptr,
             .by_token = by_token.mutable_data_ptr<float>(),
             .denominator = denominator.mutable_data_ptr<double>(),
             .loss = loss.mutable_data_ptr<float>(),
             .num_tokens = logits.size(0),
             .row_stride_bytes = logits.stride(0) * logits.element_size(),
             .ignore_index = options.ignore_index,
             .width = static_cast<std::int32_t>(logits.size(1)),
             .num_classes = static_cast<std::int32_t>(options.num_classes),
             .vocab_size = static_cast<std::int32_t>(options.num_classes),
             .logit_scale = static_cast<float>(options.logit_scale),
             .label_smoothing = static_cast<float>(options.label_smoothing),
             .z_loss = static_cast<float>(options.z_loss)} {
    kept = set_divisor(call, num_items, options.reduction, logits.device());
  }
  LossResults results() const { return {loss, by_token, denominator}; }
};

/// Any difference in a word changes about half of the bits.
std::uint64_t digest_with(std::uint64_t digest, std::uint64_t word) {
  digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
  return digest ^ digest >> 29;
}

/// The digest of arguments that must be equal on all ranks.
std::uint64_t digest_of(const LossKernelOptions& options, bool is_float, unsigned cluster_blocks) {
  std::uint64_t digest = 1;
  for (const std::uint64_t word :
       {static_cast<std::uint64_t>(options.num_classes),
        static_cast<std::uint64_t>(options.ignore_index),
        std::bit_cast<std::uint64_t>(options.logit_scale),
        std::bit_cast<std::uint64_t>(options.label_smoothing),
        std::bit_cast<std::uint64_t>(options.z_loss), std::uint64_t{options.reduction == "mean"},
        std::uint64_t{is_float}, std::uint64_t{cluster_blocks}})
    digest = digest_with(digest, word);
  return digest;
}

}  // namespace

std::optional<LossResults> cross_entropy_by_clusters(const at::Tensor& logits,
                                                     const at::Tensor& target,
                                                     const std::optional<at::Tensor>& weight,
                                                     const std::optional<at::Tensor>& num_items,
                                                     const LossKernelOptions& options) {
  if (!has_kernels_for(logits, weight, options) || logits.stride(1) != 1) return std::nullopt;
  const auto plan = cuda::plan_loss(logits.size(1) * logits.element_size(), is_aligned(logits));
  if (!plan.has_value()) return std::nullopt;
  const c10::DeviceGuard device_guard(logits.device());
  const LossKernels& kernels = LossKernels::of(logits.device().index());
  if (kernels.num_clusters(*plan) == 0) return std::nullopt;

  LossTensors tensors(logits, target, weight, num_items, options);
  tensors.call.segment_vectors = plan->segment_vectors;
  const c10::impl::VirtualGuardImpl streams(logits.device().type());
  launch(kernels, *plan, tensors.call, logits.scalar_type() == at::kFloat,
         streams.getStream(logits.device()));
  mark_written(logits);
  return tensors.results();
}

std::optional<LossResults> cross_entropy_over_shards(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& num_items, const std::string& group_name,
    std::int64_t vocab_start, const LossKernelOptions& options) {
  if (!has_kernels_for(logits, weight, options) || options.num_classes < 0) return std::nullopt;
  const auto group = group_of(group_name);
  const auto ringcomm = find_ringcomm(*group, logits);
  if (ringcomm == nullptr) return std::nullopt;
  const auto blocks =
      cuda::blocks_for_shards(options.num_classes, group->getSize(), logits.element_size());
  if (!blocks.has_value()) return std::nullopt;
  const c10::DeviceGuard device_guard(logits.device());
  const LossKernels& kernels = LossKernels::of(logits.device().index());
  const int most =
      ringcomm->row_clusters(logits.device(), *blocks, kernels.num_shard_clusters(*blocks));
  // A rank with a longer shard chooses the other path alone, and all ranks detect it.
  const auto plan = cuda::plan_shard(logits.size(1) * logits.element_size(), *blocks);
  if (most == 0 || !plan.has_value()) return std::nullopt;

  LossTensors tensors(logits, target, weight, num_items, options);
  const std::int64_t classes = std::max<std::int64_t>(options.num_classes - vocab_start, 0);
  tensors.call.num_classes = static_cast<std::int32_t>(std::min(classes, logits.size(1)));
  tensors.call.segment_vectors = plan->segment_vectors;
  if (logits.size(1) == 0) tensors.call.row_stride_bytes = 0;  // no memory
  const bool is_float = logits.scalar_type() == at::kFloat;
  const VocabShard shard{vocab_start, options.num_classes, options.ignore_index,
                         options.logit_scale, options.softcap};
  const float way = shard_entry(shard, tensors.call.num_classes, false, false).weighted;
  const VocabShard whole{0, options.num_classes, options.ignore_index, options.logit_scale,
                         options.softcap};
  const float whole_way = shard_entry(whole, options.num_classes, false, false).weighted;
  cuda::RowLaunch rows;
  rows.num_clusters = static_cast<std::uint32_t>(std::min<std::int64_t>(logits.size(0), most));
  rows.digest = digest_of(options, is_float, *blocks);
  rows.launch = [&](const cuda::KernelCall& kernel_call, cuda::StreamHandle stream) {
    ShardLossCall call;
    static_cast<cuda::KernelCall&>(call) = kernel_call;
    call.loss = tensors.call;
    call.vocab_start = vocab_start;
    call.way = way;
    call.whole_way = whole_way;
    LaunchAttribute cluster = cluster_of(plan->cluster_blocks);
    launch(
        kernels, kernels.shard_rows(is_float, options.label_smoothing != 0),
        config_of(rows.num_clusters * plan->cluster_blocks, plan->shared_bytes(), cluster, stream),
        &call, tensors.call);
  };
  std::vector<at::Tensor> kept = {logits, target, tensors.by_token, tensors.loss,
                                  tensors.denominator};
  if (tensors.kept.defined()) kept.push_back(tensors.kept);
  if (weight.has_value()) kept.push_back(*weight);
  ringcomm->all_reduce_in_rows(logits, static_cast<std::size_t>(logits.size(0)) + 1, rows,
                               std::move(kept));
  mark_written(logits);
  return tensors.results();
}

}  // namespace ringcomm
