#pragma once

// Parameters of the toy kernels that are there for emulated GPUs and for real ones.

#include <cstdint>

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

}  // namespace ringcomm::emulator
