#pragma once

#include <array>
#include <cstddef>

#include "collectives/collective.h"
#include "cuda/collectives/header_words.h"
#include "cuda/collectives/kernels.h"
#include "cuda/collectives/launch_plan.h"

namespace ringcomm::cuda {

/// A collective as it is launched.
struct PlannedCall {
  HeaderWords header = {};
  LaunchPlan plan;
  Function kernel = nullptr;
  KernelCall call;
};

/// Caches the plans of a group's last calls. A program repeats its all_reduces with the same sizes,
/// which differ in their buffers only and are planned once. Other calls are planned each time,
/// because their plans contain the buffers of all ranks or the values of an optimizer step.
class PlanCache {
 public:
  /// `frame` is the part of the kernel parameters that all collectives of the group share.
  PlanCache(const Kernels& kernels, const GroupFrame& frame) : kernels_(kernels), frame_(frame) {}

  /// Valid until the next call of this function; by one thread at a time. Throws as plan_launch().
  PlannedCall& plan(const Collective& call, const CallHeader& header);

 private:
  static constexpr std::size_t kNumKept = 16;

  const Kernels& kernels_;
  GroupFrame frame_;
  std::array<PlannedCall, kNumKept> kept_;  // by a hash of the header
  PlannedCall other_;
};

}  // namespace ringcomm::cuda
