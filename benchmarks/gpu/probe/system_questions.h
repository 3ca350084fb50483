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
  const auto message = host::recv_message(side.socket(), std::chrono::seconds(4));
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

/// Locks of open files in /dev/shm, which count the places of blocks on a GPU.
inline void file_locks(Side& side, Gpu&) {
  const std::string path = "/dev/shm/ringcomm-probe-" + std::to_string(::getppid());
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  const auto try_lock = [&](const host::UniqueFd& file) {
    return ::fcntl(file.get(), F_OFD_SETLK, &lock) == 0 ? 0 : errno;
  };
  if (side.exports()) {
    host::UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    side.page.numbers[0] = static_cast<std::uint64_t>(try_lock(file));
    side.meet();
    side.meet();
    ::unlink(path.c_str());
    file.reset();
    return side.meet();
  }
  side.meet();
  const host::UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  const auto first = static_cast<int>(side.page.numbers[0]);
  const int held = try_lock(file);
  side.meet();
  side.meet();
  const int freed = try_lock(file);
  if (first == 0 && held == EAGAIN && freed == 0)
    side.answer("exclude other processes until the file is closed");
  else
    side.answer("errors " + std::to_string(first) + ", " + std::to_string(held) + ", " +
                std::to_string(freed) + " instead of 0, " + std::to_string(EAGAIN) + ", 0");
}

}  // namespace ringcomm::probe
