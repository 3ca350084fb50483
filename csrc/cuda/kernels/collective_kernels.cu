// Where the all-reduce is, from the launch down:
//   collectives/launch_plan.cc  which kernels, how many blocks, which pieces
//   kernel_list.h               names and bodies of the kernels
//   packets.h                   small ones: one kernel that waits for packets
//   rendezvous.h, plain.h       large ones: rendezvous, a kernel that waits for nobody, rendezvous
//   gpu_block.cuh               barriers, loads and stores; reducers.h and memory.h: arithmetic
#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/kernel_list.h"

namespace ringcomm::cuda {
RINGCOMM_WAITING_KERNELS(RINGCOMM_WIDE_GPU_KERNEL)
RINGCOMM_PLAIN_KERNELS(RINGCOMM_GPU_KERNEL)
}  // namespace ringcomm::cuda
