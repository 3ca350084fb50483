#pragma once

// Opening and closing memory while a kernel runs.

#include "gpu/probe/opened_memory.h"

namespace ringcomm::probe {

/// "does not wait (41 us)".
template <class Call>
std::string waits(Side& side, const char* step, const Call& call) {
  side.step(step);
  const Clock::time_point began = Clock::now();
  call();
  const double us = us_since(began);
  const char* verdict = us * 1e3 > kHoldNs / 2 ? " waits (" : " does not wait (";
  return step + (verdict + std::to_string(static_cast<long>(us))) + " us)";
}

/// Whether open and close wait for a kernel of the process that calls them.
inline void own_kernel(Side& side, Gpu& gpu) {
  share(side, gpu, [&](const cuda::IpcMemHandle& handle) {
    cuda::DevicePtr address = 0;
    gpu.start_hold();
    const std::string opening = waits(side, "open", [&] { address = open(handle); });
    gpu.finish();
    gpu.start_hold();
    const std::string closing = waits(side, "close", [&] { close(address); });
    gpu.finish();
    side.answer(opening + ", " + closing);
  });
}

/// The same with a kernel of the other process.
inline void peer_kernel(Side& side, Gpu& gpu) {
  if (side.exports()) {
    hand_out(side, gpu, kOld);
    for (int call = 0; call < 2; ++call) {
      gpu.start_hold();
      side.meet();
      gpu.finish();
      side.meet();
    }
    return;
  }
  cuda::DevicePtr address = 0;
  side.meet();
  const std::string opening = waits(side, "open", [&] { address = open(side.page.handle); });
  side.meet();
  side.meet();
  const std::string closing = waits(side, "close", [&] { close(address); });
  side.answer(opening + ", " + closing);
  side.meet();
}

/// A running kernel gets the address of memory that was mapped after its launch.
inline void mapped_after_launch(Side& side, Gpu& gpu) {
  share(side, gpu, [&](const cuda::IpcMemHandle& handle) {
    side.step("open beside a waiting kernel");
    gpu.start_follow(0, 1'000'000'000);
    const cuda::DevicePtr address = open(handle);
    gpu.words().address = address;
    side.step("read of a running kernel");
    gpu.finish();
    if (gpu.words().has_read == 0) return side.answer("open waits until the kernel has ended");
    const bool is_right = gpu.words().value == kOld * 0x01010101u;
    side.answer(is_right ? "the kernel reads what is there" : "the kernel reads something else");
  });
}

}  // namespace ringcomm::probe
