// What triton_library.py calls.
#include "ptx/machine.h"
#include "ptx/triton_memory.h"

/// Runs a kernel's blocks one after the other. Aborts where the kernel does what a GPU must not.
extern "C" void ringcomm_ptx_launch(const ringcomm::ptx::Kernel* kernel, const void* params,
                                    const ringcomm::ptx::TensorMemory* tensors,
                                    unsigned num_tensors, unsigned grid_x, unsigned grid_y,
                                    unsigned grid_z, unsigned num_threads, unsigned shared_bytes) {
  ringcomm::ptx::begin_launch({tensors, num_tensors});
  ringcomm::ptx::run_grid(*kernel, params, {grid_x, grid_y, grid_z}, {num_threads, 1, 1},
                          shared_bytes);
}
