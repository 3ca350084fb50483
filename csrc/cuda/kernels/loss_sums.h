#pragma once

#include <cstdint>

#include "cuda/kernels/loss_call.h"
#include "cuda/kernels/loss_math.h"
#include "cuda/kernels/row_block.h"

// Sums over the tokens of a call, by the threads of one block in one order: the same bits each
// time, and in every block.

namespace ringcomm::cuda {

/// The sum of one number of each thread, returned to all threads. `of_warps` is shared memory.
template <class B>
RINGCOMM_HD double sum_of_threads(B& block, double number, double* of_warps) {
  number = block.warp_sum(number);
  if (block.thread_idx() % B::kWarpThreads == 0)
    of_warps[block.thread_idx() / B::kWarpThreads] = number;
  block.sync();
  double sum = 0;
  for (unsigned i = 0; i < block.num_threads() / B::kWarpThreads; ++i) sum += of_warps[i];
  return sum;
}

/// The sum of the weights of all targets that are not ignored.
template <class B>
RINGCOMM_HD double weight_of_targets(B& block, const LossCall& call, double* of_warps) {
  double weight = 0;
  for (std::int64_t i = block.thread_idx(); i < call.num_tokens; i += block.num_threads()) {
    const std::int64_t target = load_constant(call.targets + i);
    if (target == call.ignore_index) continue;
    if (call.class_weights == nullptr)
      weight += 1;
    else if (target >= 0 && target < call.num_classes)
      weight += static_cast<double>(load_constant(call.class_weights + target));
  }
  return sum_of_threads(block, weight, of_warps);
}

/// The kernel after the row kernel, with one block: the tokens' losses divided by the denominator.
template <class B>
RINGCOMM_HD void sum_losses(B& block, const LossCall& call) {
  double sum = 0;
  for (std::int64_t i = block.thread_idx(); i < call.num_tokens; i += block.num_threads())
    sum += static_cast<double>(call.by_token[i]);
  sum = sum_of_threads(block, sum, reinterpret_cast<LossHeading*>(block.shared())->counts);
  if (block.thread_idx() == 0) *call.loss = static_cast<float>(sum / *call.denominator);
}

}  // namespace ringcomm::cuda
