#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

namespace ringcomm::host {

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

}  // namespace ringcomm::host
