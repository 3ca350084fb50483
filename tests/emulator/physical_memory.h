#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "emulator/device.h"
#include "transport/shm/unique_fd.h"

namespace ringcomm::emulator {

/// Memory of a GPU: a memfd, which is gone with the last process that has it. Its name says which
/// GPU's it is, for those who get the descriptor.
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

}  // namespace ringcomm::emulator
