#pragma once

#include <cstddef>

#include "transport/shm/unique_fd.h"

namespace ringcomm::shm {

/// A mapping of anonymous memory that other processes can map too.
///
/// A memfd instead of shm_open: it has no name, so a killed rank leaves nothing behind, and it is
/// not limited by the size of /dev/shm (64 MB in containers by default). Pages are taken from the
/// system when first touched.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Maps `num_bytes` of `fd`, which may be closed afterwards. Throws Error.
  SharedMemory(int fd, std::size_t num_bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t num_bytes_ = 0;
};

/// A new memfd of `num_bytes`, zeroed and sealed against resizing, so that no rank can make
/// another's access fault. `name` is what /proc/PID/maps shows. Throws Error.
UniqueFd create_memfd(std::size_t num_bytes, const char* name = "ringcomm");

/// The size of a memfd. Throws Error.
std::size_t size_of_memfd(int fd);

/// Whether the system may refuse a page when it is first accessed, which is a SIGBUS: with
/// vm.overcommit_memory=2. Tests set it.
bool& may_refuse_pages();

/// If the system may refuse the pages of `num_bytes` at `begin` later, takes them now. Throws Error
/// if it has no more. Does nothing elsewhere, where memory that is never used costs nothing.
void reserve_pages(std::byte* begin, std::size_t num_bytes);
/// The same on any system.
void populate_pages(std::byte* begin, std::size_t num_bytes);

/// Throws Error unless `fd`, which a peer has sent, is a memfd that no process can resize: an
/// access past the end of a mapping is a SIGBUS.
void check_sealed(int fd);

}  // namespace ringcomm::shm
