#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringcomm::emulator {

/// libcuda_emulator.so stands in for libcuda where there is no GPU: RINGCOMM_CUDA_DRIVER names it.
/// Device memory is memory of the host that processes can share, a stream is a thread, and a kernel
/// is a function of the host's compiler (kernel_registry.h) that a thread runs per block.
///
/// Every process reads these variables once, in cuInit; a value that means nothing ends it.
///
/// With their defaults, RINGCOMM_EMULATOR_...
/// - DEVICES (1): number of GPUs; CUDA_VISIBLE_DEVICES=1,0 chooses among them and orders
/// - BOX (""): the box that the GPUs are in: processes with the same one share them
/// - SMS (16): multiprocessors of each
/// - REAL_SMS (as SMS): how many of them run blocks: with less, a control for tests of what counts
///   on them
/// - BLOCKS_PER_SM (2): blocks that one can hold at a time, at most
/// - THREADS (1): real threads that play a block's threads
/// - MEMORY (8 GiB): bytes that one process can have on one GPU; then out of memory
/// - PEER_ACCESS (1): whether GPUs can map each other's memory
/// - VMM (1): 0: no cuMemCreate and what belongs to it
/// - IPC (1): 0: the cuIpc functions fail; descriptors of cuMemCreate still travel
/// - MPS (1): 0: kernels of different processes never run on a GPU at once, so that one that spins
///   for another process's never ends
/// - QUEUES (0): hardware queues of each GPU, which streams share in turn; 0: each has its own
/// - LAZY (0): 1: a kernel is loaded when it is first asked for, and waits for the device to be
/// idle
/// - DIE_AT (0): the call of the driver at which the process kills itself; 0: it does not
/// - DELAY_US (0): before each step a stream sleeps a random time up to this
///
/// Where it differs from CUDA:
/// - The host can read and write device memory. A kernel that touches what it must not ends the
///   process by a signal, instead of an error that sticks to the context.
/// - Memory and events that are freed while another process has them open end the process, and a
///   handle of memory that would hand out other allocations is refused: CUDA leaves both undefined.
/// - The null stream is one more stream, which synchronizes with no other.
/// - A process that dies with a record of an event outstanding leaves those who wait waiting.
/// - Nothing keeps a kernel from memory of a GPU whose peer access was not enabled.
/// - Grids and blocks have one dimension, kernels one parameter.
struct Settings {
  std::vector<int> devices;  ///< the GPU behind each ordinal
  std::uint32_t box = 0;     ///< a number made of its name
  int num_sms = 16;
  int num_real_sms = 16;
  int blocks_per_sm = 2;
  int threads_per_block = 1;
  std::size_t memory_bytes = std::size_t{8} << 30;
  bool has_peer_access = true;
  bool has_vmm = true;
  bool has_ipc = true;
  bool has_mps = true;
  int num_queues = 0;
  bool is_lazy = false;
  long long dies_at = 0;
  int max_delay_us = 0;
};

const Settings& settings();

}  // namespace ringcomm::emulator
