#pragma once

// What opened memory is after another open, a close, or a free.

#include "gpu/probe/opened_memory.h"

namespace ringcomm::probe {

/// One address or two, and what the first close does.
inline void open_twice(Side& side, Gpu& gpu) {
  share(side, gpu, [&](const cuda::IpcMemHandle& handle) {
    const cuda::DevicePtr first = open(handle);
    cuda::DevicePtr second = 0;
    side.step("the second open");
    if (const auto result = try_open(handle, &second); result != cuda::kSuccess)
      return side.answer("the second open: " + name_of(result));
    close(second);
    const std::string addresses = first == second ? "one address" : "two addresses";
    if (!is_mapped(first)) return side.answer(addresses + ", unmapped by the first close");
    const std::string read = content(gpu, first);
    close(first);
    side.answer(addresses + ", mapped until the " +
                (is_mapped(first) ? "process ends" : "second close") + ", which reads " + read);
  });
}

/// The exporter frees, and allocates at the same address, while the importer has the old mapping.
inline void address_again(Side& side, Gpu& gpu) {
  if (side.exports()) {
    const cuda::DevicePtr old = hand_out(side, gpu, kOld);
    side.meet();
    side.meet();
    side.step("free");
    cuda::check(cuda::driver().mem_free(old), "free");
    bool is_again = false;
    for (int i = 0; i < 16 && !is_again; ++i) is_again = hand_out(side, gpu, kNew) == old;
    side.page.numbers[0] = is_again;
    side.meet();
    return side.meet();
  }
  side.meet();
  const cuda::DevicePtr old = open(side.page.handle);
  side.meet();
  side.meet();
  const std::string where = side.page.numbers[0] != 0 ? "" : "another address; ";
  cuda::DevicePtr held = 0, after = 0;
  side.step("open with the old mapping");
  const auto result = try_open(side.page.handle, &held);
  std::string text = where + "with the old mapping open: ";
  text += result == cuda::kSuccess ? content(gpu, held) : name_of(result);
  if (result == cuda::kSuccess && held != old) close(held);
  side.step("close and open");
  close(old);
  const auto again = try_open(side.page.handle, &after);
  text += "; after its close: ";
  side.answer(text + (again == cuda::kSuccess ? content(gpu, after) : name_of(again)));
  side.meet();
}

inline std::string more_mib(std::uint64_t before, std::uint64_t after) {
  return std::to_string(static_cast<std::int64_t>(after - before));
}

/// The exporter frees memory that the importer then reads; when the memory is free again.
inline void freed_while_open(Side& side, Gpu& gpu) {
  auto& numbers = side.page.numbers;
  if (side.exports()) {
    const cuda::DevicePtr address = hand_out(side, gpu, kOld);
    side.meet();
    side.meet();
    numbers[0] = gpu.free_mib();
    side.step("free");
    cuda::check(cuda::driver().mem_free(address), "free");
    numbers[1] = gpu.free_mib();
    side.meet();
    side.meet();
    numbers[2] = gpu.free_mib();
    side.meet();
    return side.meet();
  }
  side.meet();
  const cuda::DevicePtr address = open(side.page.handle);
  side.meet();
  side.meet();
  side.step("read after the free");
  const std::string read = content(gpu, address);
  side.step("close after the free");
  close(address);
  side.meet();
  side.meet();
  side.answer("reads " + read + "; the free gives back " + more_mib(numbers[0], numbers[1]) +
              " MiB of 32, the close " + more_mib(numbers[1], numbers[2]));
  side.meet();
}

}  // namespace ringcomm::probe
