#pragma once

// Questions about descriptors, locks of files, and the cost of calls.

#include <cerrno>

#include "gpu/probe/opened_memory.h"
#include "host/fd.h"
#include "host/unix_socket.h"

namespace ringcomm::probe {

/// Memory by file descriptor, as groups share it.
inline void descriptors(Side& side, Gpu& gpu) {
  if (side.exports()) {
    const cuda::DeviceMemory memory(0, kBytes);
    gpu.fill(reinterpret_cast<cuda::DevicePtr>(memory.data()), kOld, kBytes);
    side.step("cuMemExportToShareableHandle");
    host::send_message(side.socket(), "memory", memory.export_fd().get());
    return side.meet();
  }
  host::is_readable(side.socket(), std::chrono::seconds(4));
  const auto message = host::recv_message(side.socket());
  if (!message || !message->fd) throw std::runtime_error("no descriptor came");
  side.step("cuMemImportFromShareableHandle");
  const cuda::DeviceMemory memory(0, kBytes, message->fd);
  side.answer("reads " + content(gpu, reinterpret_cast<cuda::DevicePtr>(memory.data())));
  side.meet();
}

/// What every collective of ordinary tensors asks of the driver.
inline void attribute_cost(Side& side, Gpu& gpu) {
  constexpr int kCalls = 10'000;
  share(side, gpu, [&](const cuda::IpcMemHandle& handle) {
    cuda::DevicePtr own = 0;
    cuda::check(cuda::driver().mem_alloc(&own, kBytes), "allocate");
    const cuda::DevicePtr opened = open(handle);
    std::string text;
    for (const auto& [name, address] : {std::pair{"own", own}, std::pair{", opened", opened}}) {
      const Clock::time_point began = Clock::now();
      for (int i = 0; i < kCalls; ++i) cuda::allocation_of(reinterpret_cast<const void*>(address));
      text += name + (" " + std::to_string(static_cast<long>(us_since(began) * 1e3 / kCalls)));
    }
    side.answer(text + " ns");
  });
}

}  // namespace ringcomm::probe
