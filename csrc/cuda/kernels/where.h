#pragma once

#include <cstdint>

#include "cuda/kernels/phases.h"

namespace ringcomm::cuda {

/// The multiprocessor that runs this block; 0 on a host.
RINGCOMM_HD inline std::uint32_t multiprocessor() {
#ifdef __CUDA_ARCH__
  std::uint32_t idx;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(idx));
  return idx;
#else
  return 0;
#endif
}

/// A barrier that shows where a GPU places blocks that wait for other ranks: block b writes its
/// multiprocessor to word b of the output, and waits for block b of all ranks.
template <Block B>
class Where {
 public:
  RINGCOMM_HD Where(B& block, const KernelCall& call)
      : block_(block), call_(call), phases_(block, call) {}

  RINGCOMM_HD Stop run() {
    if (block_.thread_idx() == 0)
      reinterpret_cast<std::uint32_t*>(call_.outputs[0])[block_.block_idx()] = multiprocessor();
    std::byte* region = nullptr;
    const Stop stop = phases_.open(region, false);
    return stop == Stop::kNone ? phases_.rejoin() : stop;
  }

 private:
  B& block_;
  const KernelCall& call_;
  Phases<B> phases_;
};

template <Block B>
RINGCOMM_HD void where(B& block, const KernelCall& call) {
  run_collective<Where<B>>(block, call);
}

}  // namespace ringcomm::cuda
