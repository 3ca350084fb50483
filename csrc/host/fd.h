#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

// Memory that processes share, and the Unix sockets over which they pass it. All of it throws
// Error.

namespace ringcomm::shm {

/// That the system call `what` has failed with the error `code`, and what to do about it.
std::string describe_errno(const std::string& what, int code);
/// Throws that of `what`, which has just failed and set errno.
[[noreturn]] void throw_errno(const std::string& what);

/// The same file at a descriptor from 3 on, and `fd` closed if it was another. Below are the
/// standard ones: where a program has closed its error output, lines of text would be written into
/// our file. -1, and errno, if there is no descriptor; -1 stays -1.
inline int above_standard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int code = errno;
  ::close(fd);
  errno = code;
  return moved;
}

/// Device and inode of a file. Of device 0: kNoFile, and what the system does not tell.
using FileId = std::pair<std::uint64_t, std::uint64_t>;
inline constexpr FileId kUnknownFile{0, 0}, kNoFile{0, 1};
/// That at a descriptor. Keeps errno.
inline FileId file_at(int fd) {
  const int code = errno;
  struct stat status{};
  FileId file = kNoFile;
  if (fd >= 0 && ::fstat(fd, &status) == 0)
    file = {status.st_dev, status.st_ino};
  else if (fd >= 0 && errno != EBADF)
    file = kUnknownFile;
  errno = code;
  return file;
}

/// Owns a file descriptor, which is 3 or more. It closes its own file only: a library that closes
/// all descriptors of the process (a daemon's) frees the number for a file of the program.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(above_standard(fd)), file_(file_at(fd_)) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), file_(other.file_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::exchange(other.fd_, -1);
    file_ = other.file_;
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (has_its_file()) ::close(fd_);
    fd_ = above_standard(fd);
    file_ = file_at(fd_);
  }
  /// Whether nobody else has closed it.
  bool has_its_file() const {
    if (fd_ < 0 || file_ == kUnknownFile) return fd_ >= 0;
    const FileId now = file_at(fd_);
    return now == file_ || now == kUnknownFile;
  }

 private:
  int fd_ = -1;
  FileId file_ = kNoFile;
};

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
bool& may_refuse_pages();
/// If the system may refuse the pages of `num_bytes` at `begin` later, takes them now.
void reserve_pages(std::byte* begin, std::size_t num_bytes);

// Sockets for sequenced packets, in the abstract namespace. Any user can take a name that is free,
// so both ends check that the other runs as the same user or root.

/// A socket that listens at `name`.
UniqueFd listen_at(const std::string& name);
/// A socket connected to `name`. None, and errno, ECONNREFUSED when no process listens there,
/// EAGAIN when more wait to be accepted there than the system allows, after kLookInterval. Throws
/// for another user's.
UniqueFd connect_to(const std::string& name);

ucred credentials_of_peer(int socket);
/// Why the other end may not be a process of this one's user, or of root; empty if it is.
std::string why_untrusted(int socket);

/// Bits that nobody can guess.
std::uint64_t random_number();
/// 32 hexadecimal digits of 128 such bits.
std::string random_text();

/// Whether a message, or the end of the connection, arrived in time (days at most).
bool is_readable(int socket, std::chrono::milliseconds timeout);

inline constexpr std::size_t kMaxTextBytes = 512;

struct SocketMessage {
  std::string text;
  UniqueFd fd;
};
/// Sends a text, which is not empty, and a descriptor unless `fd` is -1. Returns the system's
/// error, or 0; send_message() throws it.
int try_send(int socket, std::string text, int fd = -1);
void send_message(int socket, std::string text, int fd = -1);
/// Nothing if none arrived in time. An empty text if the other end is closed or sent too much; no
/// descriptor if it sent none or several.
std::optional<SocketMessage> recv_message(int socket, std::chrono::milliseconds timeout);

}  // namespace ringcomm::shm
