#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

// File descriptors: memory that processes share, and the Unix sockets over which they pass it.
// Everything here throws Error.

namespace ringcomm::shm {

/// Throws for the system call `what`, which has just failed and set errno.
[[noreturn]] void throw_errno(const std::string& what);

/// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

/// A mapping of anonymous memory that other processes can map too.
///
/// A memfd instead of shm_open: it has no name, so a killed rank leaves nothing behind, and it is
/// not limited by the size of /dev/shm (64 MB in containers by default).
class SharedMemory {
 public:
  SharedMemory() = default;
  /// Maps `num_bytes` of `fd`, which may be closed afterwards.
  SharedMemory(int fd, std::size_t num_bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t num_bytes() const { return data_.get_deleter().num_bytes; }

 private:
  struct Unmap {
    std::size_t num_bytes;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte[], Unmap> data_;
};

/// A new memfd of `num_bytes`, zeroed and sealed against resizing, so that no rank can make
/// another's access fault. `name` is what /proc/PID/maps shows.
UniqueFd create_memfd(std::size_t num_bytes, const char* name = "ringcomm");
std::size_t size_of_memfd(int fd);
/// Throws unless `fd`, which a peer has sent, is a memfd that no process can resize: an access past
/// the end of a mapping is a SIGBUS.
void check_sealed(int fd);

/// Whether the system may refuse a page when it is first accessed, which is a SIGBUS: with
/// vm.overcommit_memory=2. Tests set it.
bool& may_refuse_pages();
/// If the system may refuse the pages of `num_bytes` at `begin` later, takes them now. Does nothing
/// elsewhere, where memory that is never used costs nothing.
void reserve_pages(std::byte* begin, std::size_t num_bytes);
/// The same on any system.
void populate_pages(std::byte* begin, std::size_t num_bytes);

// Sockets for sequenced packets, in the abstract namespace, whose names any user can take once they
// are free. So both ends check that the other runs as the same user or root.

/// A socket that listens at `name`.
UniqueFd listen_at(const std::string& name);
/// A socket connected to `name`; none when no process listens there. Throws when the process that
/// listens runs as another user.
UniqueFd connect_to(const std::string& name);

ucred credentials_of_peer(int socket);
/// Whether the other end is a process of this one's user, or of root.
bool is_trusted_peer(int socket);

/// Whether a message, or the end of the connection, arrived in time.
bool is_readable(int socket, std::chrono::milliseconds timeout);

void send_text(int socket, const std::string& text);
/// The same without a wait or an error: the text is truncated to the maximum size, and dropped if
/// the other end is closed or does not read.
void try_send_text(int socket, const std::string& text) noexcept;
/// Receives one message; an empty text if the other end is closed or sent too much. False if none
/// arrived in time.
bool recv_text(int socket, std::chrono::milliseconds timeout, std::string& text);

void send_fd(int socket, int fd);
/// Receives the descriptor of one message; none if the other end is closed, sent anything else, or
/// nothing arrived in time.
UniqueFd recv_fd(int socket, std::chrono::milliseconds timeout);

}  // namespace ringcomm::shm
