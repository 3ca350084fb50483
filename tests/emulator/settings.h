#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringcomm::emulator {

/// X(Type, member, name, otherwise, least, most)
#define RINGCOMM_SETTINGS(X)                                                 \
  X(int, num_sms, "SMS", 16, 1, INT_MAX)                                     \
  X(int, num_real_sms, "REAL_SMS", num_sms, 1, INT_MAX)                      \
  X(int, blocks_per_sm, "BLOCKS_PER_SM", 2, 1, INT_MAX)                      \
  X(int, threads_per_block, "THREADS", 1, 1, INT_MAX)                        \
  X(std::size_t, memory_bytes, "MEMORY", std::size_t{8} << 30, 0, LLONG_MAX) \
  X(bool, has_peer_access, "PEER_ACCESS", true, 0, 1)                        \
  X(bool, has_vmm, "VMM", true, 0, 1)                                        \
  X(bool, has_ipc, "IPC", true, 0, 1)                                        \
  X(bool, has_mps, "MPS", true, 0, 1)                                        \
  X(int, num_queues, "QUEUES", 0, 0, INT_MAX)                                \
  X(bool, is_lazy, "LAZY", false, 0, 1)                                      \
  X(bool, is_late, "LATE", false, 0, 1)                                      \
  X(long long, dies_at, "DIE_AT", 0, 0, LLONG_MAX)                           \
  X(int, max_delay_us, "DELAY_US", 0, 0, INT_MAX)

/// libcuda_emulator.so replaces libcuda on machines without a GPU: RINGCOMM_CUDA_DRIVER names it.
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
/// - MPS (1): 0: kernels of different processes never run on a GPU at the same time, so a kernel
///   that waits for another process's kernel never ends
/// - QUEUES (0): hardware queues of each GPU, which streams share round-robin; 0: each stream has
///   its own
/// - LAZY (0): 1: a kernel is loaded at its first use, which waits until the device is idle
/// - LATE (0): 1: plain accesses of kernels take effect as late as a GPU allows (block_cache.h),
///   except those of headers of phases, and within a cluster
/// - DIE_AT (0): the call of the driver at which the process kills itself; 0: it does not
/// - DELAY_US (0): before each step a stream sleeps a random time up to this
///
/// Where it differs from CUDA:
/// - The host can read and write device memory. A kernel that touches what it must not ends the
///   process by a signal, instead of an error that sticks to the context.
/// - Memory and events that are freed while another process has them open end the process, and a
///   handle of memory that would also export other allocations is refused: CUDA leaves both
///   undefined.
/// - The null stream is one more stream, which synchronizes with no other.
/// - If a process dies before a recorded event completes, waits for that event never end.
/// - Nothing keeps a kernel from memory of a GPU whose peer access was not enabled.
/// - Grids and blocks have one dimension, kernels one parameter.
struct Settings {
  std::vector<int> devices;  ///< the GPU behind each ordinal
  std::uint32_t box = 0;     ///< a number made of its name
#define RINGCOMM_DECLARE(Type, member, name, otherwise, least, most) Type member = otherwise;
  RINGCOMM_SETTINGS(RINGCOMM_DECLARE)
#undef RINGCOMM_DECLARE
};

const Settings& settings();

}  // namespace ringcomm::emulator
