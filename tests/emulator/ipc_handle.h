#pragma once

#include <sys/types.h>

#include <cstdint>

#include "emulator/errors.h"
#include "emulator/exports.h"
#include "transport/shm/unique_fd.h"

namespace ringcomm::emulator {

/// What fills the 64 bytes of a handle that goes to another process: where to find the descriptor
/// of memory while the process that made it lives. The inode tells whether it still is that memory.
struct IpcHandle {
  char magic[8];
  pid_t pid;
  int fd;
  ino_t inode;
  std::uint8_t reserved[40];
};
static_assert(sizeof(IpcHandle) == 64);

enum class IpcKind : char { kMemory = 'm', kEvent = 'e' };

/// Writes the handle of this process's memory `fd` to the 64 bytes at `handle`.
Result write_handle(IpcKind kind, int fd, void* handle);

/// Ends this process if another has open what it is about to free: CUDA does not say what happens
/// then. `fd` is of the memory, `what` names it.
void check_not_opened_elsewhere(int fd, const char* what);

/// Opens what another process has written, and marks it as open while the descriptor lives. Errors
/// are CUDA's: kInvalidContext for a handle of this process, kMapFailed if its maker is gone or has
/// freed it, kNotSupported where IPC is switched off.
Result open_handle(IpcKind kind, const void* handle, shm::UniqueFd* fd);

}  // namespace ringcomm::emulator
