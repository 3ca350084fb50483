#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "emulator/device.h"
#include "transport/shm/fd.h"

namespace ringcomm::emulator {

/// Memory of a GPU: a memfd, which exists until the last process closes it. Its name identifies the
/// GPU, for processes that receive the descriptor.
class PhysicalMemory {
 public:
  /// kErrorOutOfMemory if this process would have more on `device` than it may.
  static Result create(DeviceOrdinal device, std::size_t num_bytes,
                       std::shared_ptr<PhysicalMemory>* memory);
  /// Memory that another process, or this one, created. kInvalidValue unless `fd` is of such.
  static Result import(int fd, std::shared_ptr<PhysicalMemory>* memory);

  PhysicalMemory() = default;
  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  int fd() const { return fd_.get(); }
  std::size_t num_bytes() const { return num_bytes_; }
  int physical_device() const { return physical_device_; }
  ino_t inode() const { return inode_; }

  bool is_exportable = false;  ///< by descriptor

 private:
  shm::UniqueFd fd_;
  std::size_t num_bytes_ = 0;
  int physical_device_ = 0;
  ino_t inode_ = 0;
  DeviceOrdinal charged_ = -1;  // whose budget it counts against; -1 for imported memory
};

/// Bytes that this process has created on a device.
std::size_t used_bytes(DeviceOrdinal device);

enum class IpcKind : char { kMemory = 'm', kEvent = 'e' };

/// Writes the handle of this process's memory `fd` to the 64 bytes at `handle`.
Result write_handle(IpcKind kind, int fd, void* handle);

/// Ends this process if another one has open what it is about to free, because CUDA leaves that
/// undefined. `fd` is the memory's descriptor, `what` its name for the message.
void check_not_opened_elsewhere(int fd, const char* what);

/// Opens a handle of another process, and marks its memory as open while the descriptor lives.
/// Errors are CUDA's: kInvalidContext for a handle of this process, kMapFailed if its maker is gone
/// or has freed it, kNotSupported where IPC is switched off.
Result open_handle(IpcKind kind, const void* handle, shm::UniqueFd* fd);

}  // namespace ringcomm::emulator
