// Where the all-reduce is, from the launch down:
//   collectives/launch_plan.cc  which kernel, how many blocks, which slices
//   kernel_list.h               names and bodies of the kernels: two_shot is reduce_gather
//   reduce_gather.h             ReduceGather::run(), the steps of a slice; one_shot.h: by packets
//   phases.h                    what a step waits for and publishes, and lent buffers
//   core/board_protocol.h       cursors; block.h: how a block waits for one
//   gpu_block.cuh               barriers, loads and stores; reducers.h and memory.h: arithmetic
#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_REDUCTION_KERNELS(RINGCOMM_GPU_KERNEL)
RINGCOMM_OTHER_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
