// The kernels of the short form: of each family one of bf16 and one of any type.
#include "cuda/kernels/gpu_block.cuh"
#include "cuda/kernels/kernel_list.h"

// RINGCOMM_WANTED_name is defined for the kernels that are wanted, and makes SECOND(...) the first
// macro instead of the second.
#define RINGCOMM_SECOND(first, second, ...) second
#define RINGCOMM_CHOOSE(...) RINGCOMM_SECOND(__VA_ARGS__, RINGCOMM_NO_KERNEL, )
#define RINGCOMM_NO_KERNEL(name, Call, body)
#define RINGCOMM_WANTED_KERNEL(name, Call, body) \
  RINGCOMM_CHOOSE(RINGCOMM_WANTED_##name)(name, Call, body)

#define RINGCOMM_WANTED ~, RINGCOMM_WIDE_GPU_KERNEL
#define RINGCOMM_WANTED_ringcomm_one_shot_bfloat16 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_two_rounds_bfloat16 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_two_rounds_any RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_reduce_packets_bfloat16 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_move_packets RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_ring_bfloat16 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_open RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_close RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_reduce_bfloat16 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_reduce_any RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_move RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_copy_in RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_copy_out RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_open_messages RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_copy_messages RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_close_messages RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_update_sgd_float32_float32 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_update_adamw_float32_float32 RINGCOMM_WANTED
#define RINGCOMM_WANTED_ringcomm_update_lomo_float32_float32 RINGCOMM_WANTED

namespace ringcomm::cuda {
RINGCOMM_ALL_KERNELS(RINGCOMM_WANTED_KERNEL)
}  // namespace ringcomm::cuda
