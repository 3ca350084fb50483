#pragma once

#include <array>
#include <cstddef>

#include "collectives/collective.h"
#include "collectives/cuda/header_words.h"
#include "collectives/cuda/kernels.h"
#include "collectives/cuda/launch_plan.h"

namespace ringcomm::cuda {

/// A collective as it is launched.
struct PlannedCall {
  HeaderWords header = {};
  LaunchPlan plan;
  Function kernel = nullptr;
  KernelCall call;
};

/// What plan_launch() has made of the last calls of a group. A program repeats its all_reduces with
/// the same sizes: those differ in their buffers alone, and are planned once. Every other call is
/// planned anew, as its plan has the buffers of all ranks or the numbers of an optimizer's step.
class PlanCache {
 public:
  /// Of the kernel's parameter, all collectives of the group have `frame`.
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
