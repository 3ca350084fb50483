#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "host/fd.h"

namespace ringcomm::host {

/// A mapping of anonymous memory that other processes can map too: of a memfd, which has no name,
/// so a killed rank leaves nothing behind, and is not limited by the size of /dev/shm.
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Maps `num_bytes` of `fd`, which may be closed afterwards.
  SharedMemory(int fd, std::size_t num_bytes);
  /// Maps all of what a peer has sent. Throws unless that is a memfd that no process can resize: an
  /// access past the end of a mapping is a SIGBUS.
  static SharedMemory of_peer(int fd);

  std::byte* data() const { return data_.get(); }
  std::size_t num_bytes() const { return data_.get_deleter().num_bytes; }

 private:
  struct Unmap {
    std::size_t num_bytes;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte[], Unmap> data_;
};

/// A new memfd of `num_bytes`, zeroed and sealed against resizing. `name` is for /proc/PID/maps.
UniqueFd create_memfd(std::size_t num_bytes, const char* name = "ringcomm");

/// Whether the system may refuse a page when it is first accessed, which is a SIGBUS: with
/// vm.overcommit_memory=2. Tests set it.
std::atomic<bool>& may_refuse_pages();
/// If the system may refuse the pages of `num_bytes` at `begin` later, takes them now.
void reserve_pages(std::byte* begin, std::size_t num_bytes);
/// Returns the whole pages of `num_bytes` at `begin`, shared by all processes, to the system: they
/// read as zeros. Where the system may refuse pages, they must be reserved again before use.
void return_pages(std::byte* begin, std::size_t num_bytes);

}  // namespace ringcomm::host
