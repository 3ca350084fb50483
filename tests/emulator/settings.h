#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace ringcomm::emulator {

/// The number in RINGCOMM_EMULATOR_`name`; `otherwise` where it is not set. One that is no number
/// from `least` to `most` ends the process.
long long setting(const char* name, long long otherwise, long long least = 0,
                  long long most = INT_MAX);

/// libcuda_emulator.so replaces libcuda on machines without a GPU: RINGCOMM_CUDA_DRIVER names it.
/// Device memory is memory of the host that processes can share, a stream is a thread, and a kernel
/// is a function of the host's compiler (kernel_registry.h) that a thread runs per block.
///
/// Every process reads these variables once, in cuInit, with RINGCOMM_EMULATOR_ before each name.
/// One more is BOX (""), the box that the GPUs are in: processes with the same one share them.
///
/// Where it differs from CUDA:
/// - The host can read and write device memory. A kernel that touches what it must not ends the
///   process by a signal, instead of an error that sticks to the context.
/// - Memory that is freed while another process has it open exists until that closes it, and a
///   handle of memory that would also export other allocations is refused: CUDA leaves both
///   undefined.
/// - The null stream is one more stream, which synchronizes with no other, and all others are to be
///   non-blocking. A null pointer for a result ends the process.
/// - Nothing keeps a kernel from memory of a GPU whose peer access was not enabled.
/// - A child that is forked after cuInit gets no error, although no stream has a thread there.
/// - Grids have one dimension, blocks two, kernels one parameter.
struct Settings {
  static int number(const char* name, int otherwise, int least = 0) {
    return static_cast<int>(setting(name, otherwise, least));
  }
  static bool flag(const char* name, bool otherwise) { return setting(name, otherwise, 0, 1) != 0; }

  std::uint32_t box = 0;  ///< a number made of its name
  int num_devices = number("DEVICES", 1);
  /// Multiprocessors of each GPU, and how many of them run blocks: with less, a control for tests
  /// of what counts on them.
  int num_sms = number("SMS", 16, 1);
  int num_real_sms = number("REAL_SMS", num_sms, 1);
  int blocks_per_sm = number("BLOCKS_PER_SM", 2, 1);  ///< at a time, at most
  int threads_per_block = number("THREADS", 1, 1);    ///< real threads that play a block's
  /// Bytes that one process can have on one GPU.
  long long memory_bytes = setting("MEMORY", 8LL << 30, 0, LLONG_MAX);
  bool has_peer_access = flag("PEER_ACCESS", true);  ///< GPUs can map each other's memory
  /// What one GPU writes to memory of another does not arrive there.
  bool loses_peer_writes = flag("LOSES_PEER_WRITES", false);
  bool has_multicast = flag("MULTICAST", false);  ///< GPUs have switches that add
  bool has_vmm = flag("VMM", true);               ///< cuMemCreate and what belongs to it
  bool has_ipc = flag("IPC", true);               ///< the cuIpc functions
  /// Memory of an owner is not opened while what the owner had at its address before is still open,
  /// as by older drivers.
  bool refuses_reused = flag("REFUSES_REUSED", false);
  /// The number of an allocation is its address, which others get later: a control for tests of
  /// what knows allocations by their numbers.
  bool reuses_ids = flag("REUSES_IDS", false);
  /// Without, kernels of different processes never run on a GPU at the same time, so a kernel that
  /// waits for another process's kernel never ends.
  bool has_mps = flag("MPS", true);
  /// Hardware queues of each GPU, which streams share round-robin; as CUDA has them where
  /// CUDA_DEVICE_MAX_CONNECTIONS is not set. 0: each stream has its own.
  int num_queues = number("QUEUES", has_mps ? 2 : 8);
  /// A kernel is loaded at its first use, which waits until the device is idle.
  bool is_lazy = flag("LAZY", false);
  /// The call of the driver at which the process kills itself; 0: it does not.
  long long dies_at = setting("DIE_AT", 0, 0, LLONG_MAX);
  int max_delay_us = number("DELAY_US", 0);  ///< a stream sleeps up to this before each step
  int seed = number("SEED", 0);              ///< of these delays, with the stream's number
};

const Settings& settings();

}  // namespace ringcomm::emulator
