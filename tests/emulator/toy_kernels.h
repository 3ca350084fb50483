#pragma once

#include <cstdint>

// Kernels for the tests of the emulator itself, and their parameters.

namespace ringcomm::emulator {

/// "toy_add": to[i] += number, by all threads of all blocks.
struct ToyAdd {
  std::int32_t* to = nullptr;
  std::int64_t num_elems = 0;
  std::int32_t number = 0;
};

/// "toy_scale": to[i] *= number, so that the order of kernels can be seen.
using ToyScale = ToyAdd;

/// "toy_signal": stores `value` in the flag.
struct ToySignal {
  std::uint32_t* flag = nullptr;
  std::uint32_t value = 0;
};

/// "toy_await": every block adds one to `num_running`, spins until the flag holds `value`, or for
/// `limit_ms`, and in the latter case adds one to `num_gave_up`. The counts may be null.
struct ToyAwait {
  std::uint32_t* flag = nullptr;
  std::uint32_t value = 0;
  std::uint32_t limit_ms = 0;
  std::uint32_t* num_running = nullptr;
  std::uint32_t* num_gave_up = nullptr;
};

/// "toy_meet": every block adds one to `num_arrived`, spins until all blocks of the grid have, or
/// for `limit_ms`, and adds one to `num_met` in the first case.
struct ToyMeet {
  std::uint32_t* num_arrived = nullptr;
  std::uint32_t* num_met = nullptr;
  std::uint32_t limit_ms = 0;
};

/// "toy_threads": each thread t of block b stores t + 1 in a slot of the block, and after sync()
/// the first one stores their sum in sums[b].
struct ToyThreads {
  std::int32_t* slots = nullptr;  // num_threads of each block
  std::int32_t* sums = nullptr;
};

}  // namespace ringcomm::emulator
