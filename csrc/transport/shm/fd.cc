#include "transport/shm/fd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>

#include "core/errors.h"
#include "core/annotations.h"
#include "transport/process.h"
#include "transport/wait_limits.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // Linux 6.3
#endif

namespace ringcomm::shm {
namespace {

constexpr std::size_t kMaxTextBytes = 256;

// A socket, and `call` (bind or connect) on it with `name`, after which errno is 0 if that
// succeeded.
template <class Call>
UniqueFd open_socket(const std::string& name, const Call& call) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("socket(AF_UNIX)");
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (name.size() > sizeof(address.sun_path) - 1)
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: a name of " + std::to_string(name.size()) +
                                                  " bytes is too long for an abstract Unix socket");
  // A leading zero byte selects the abstract namespace: no file, and the name is freed with its
  // last descriptor.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  errno = 0;
  call(fd.get(), reinterpret_cast<const sockaddr*>(&address), num_bytes);
  return fd;
}

// One byte of data, which a message must have, and a descriptor. The object points into itself, so
// it must not be moved.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = CMSG_LEN(sizeof(int));  // room for one
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 1;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

}  // namespace

void throw_errno(const std::string& what) {
  const int code = errno;
  throw Error({.kind = ErrorKind::kSystem}, "ringcomm: " + what +
                                                " failed: " + std::strerror(code) + " (errno " +
                                                std::to_string(code) + ")");
}

SharedMemory::SharedMemory(int fd, std::size_t num_bytes) {
  RINGCOMM_STEP("before memory is mapped");
  void* address = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED)
    throw_errno("mmap of " + std::to_string(num_bytes) + " bytes of shared memory");
  data_ = {static_cast<std::byte*>(address), Unmap{num_bytes}};
}

void SharedMemory::Unmap::operator()(std::byte* data) const { ::munmap(data, num_bytes); }

UniqueFd create_memfd(std::size_t num_bytes, const char* name) {
  // With vm.memfd_noexec=2 the kernel refuses a memfd without MFD_NOEXEC_SEAL.
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create(name, kFlags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create(name, kFlags));  // an older kernel
  if (!fd) throw_errno("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(num_bytes)) != 0)
    throw_errno("ftruncate of a memfd to " + std::to_string(num_bytes) + " bytes");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_errno("fcntl(F_ADD_SEALS)");
  return fd;
}

std::size_t size_of_memfd(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw_errno("fstat of a memfd");
  return static_cast<std::size_t>(status.st_size);
}

void check_sealed(int fd) {
  constexpr int kWanted = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kWanted) != kWanted)
    throw Error({.kind = ErrorKind::kSystem},
                "ringcomm: the shared memory that a peer sent is not sealed against resizing, so "
                "ringcomm did not create it; it is not used");
}

bool& may_refuse_pages() {
  static bool may_refuse = [] {
    int policy = 0;
    std::ifstream("/proc/sys/vm/overcommit_memory") >> policy;
    return policy == 2;
  }();
  return may_refuse;
}

void reserve_pages(std::byte* begin, std::size_t num_bytes) {
  if (may_refuse_pages()) populate_pages(begin, num_bytes);
}

void populate_pages(std::byte* begin, std::size_t num_bytes) {
  RINGCOMM_STEP("before pages are taken");
  const std::size_t skipped_bytes = reinterpret_cast<std::uintptr_t>(begin) % page_bytes();
  if (::madvise(begin - skipped_bytes, whole_pages(skipped_bytes + num_bytes),
                MADV_POPULATE_WRITE) == 0 ||
      errno == EINVAL)  // kernels before 5.14
    return;
  if (errno == EFAULT) errno = ENOMEM;
  throw_errno("taking " + std::to_string(num_bytes) +
              " bytes of shared memory from the system (free some, or raise vm.overcommit_ratio)");
}

UniqueFd listen_at(const std::string& name) {
  UniqueFd fd = open_socket(name, ::bind);
  if (errno != 0) throw_errno("bind to the abstract Unix socket " + name);
  if (::listen(fd.get(), SOMAXCONN) != 0) throw_errno("listen at the abstract Unix socket " + name);
  return fd;
}

UniqueFd connect_to(const std::string& name) {
  RINGCOMM_STEP("before a connection");
  UniqueFd fd = open_socket(name, ::connect);
  if (errno == ECONNREFUSED) return UniqueFd();
  if (errno != 0) throw_errno("connect to the abstract Unix socket " + name);
  if (is_trusted_peer(fd.get())) return fd;
  const ucred peer = credentials_of_peer(fd.get());
  throw Error({.kind = ErrorKind::kSystem, .pid = peer.pid},
              "ringcomm: the process at the abstract Unix socket " + name + " (pid " +
                  std::to_string(peer.pid) + ") runs as user " + std::to_string(peer.uid) +
                  " and this one as user " + std::to_string(::geteuid()) +
                  "; run all ranks of a host as one user");
}

ucred credentials_of_peer(int socket) {
  ucred credentials{};
  socklen_t num_bytes = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &num_bytes) != 0)
    throw_errno("getsockopt(SO_PEERCRED)");
  return credentials;
}

bool is_readable(int socket, std::chrono::milliseconds timeout) {
  pollfd entry{.fd = socket, .events = POLLIN, .revents = 0};
  const auto deadline = deadline_after(timeout);
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto left_ms = std::clamp<std::chrono::milliseconds::rep>(
        left.count(), 0, std::numeric_limits<int>::max());
    const int ready = ::poll(&entry, 1, static_cast<int>(left_ms));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) throw_errno("poll of a Unix socket");
  }
}

bool is_trusted_peer(int socket) {
  // Root may read this process's memory anyway, and ranks may drop root after the rendezvous.
  const uid_t uid = credentials_of_peer(socket).uid;
  return uid == ::geteuid() || uid == 0;
}

void send_text(int socket, const std::string& text) {
  RINGCOMM_STEP("before a request");
  if (::send(socket, text.data(), text.size(), MSG_NOSIGNAL) < 0)
    throw_errno("send on a Unix socket");
}

void try_send_text(int socket, const std::string& text) noexcept {
  [[maybe_unused]] const ssize_t ignored = ::send(
      socket, text.data(), std::min(text.size(), kMaxTextBytes), MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool recv_text(int socket, std::chrono::milliseconds timeout, std::string& text) {
  if (!is_readable(socket, timeout)) return false;
  std::array<char, kMaxTextBytes> buffer;
  // MSG_TRUNC: the size of the message, also where it is larger than the buffer.
  const ssize_t num_bytes = ::recv(socket, buffer.data(), buffer.size(), MSG_TRUNC);
  const bool is_text = num_bytes > 0 && static_cast<std::size_t>(num_bytes) <= buffer.size();
  text.assign(buffer.data(), is_text ? static_cast<std::size_t>(num_bytes) : 0);
  return true;
}

void send_fd(int socket, int fd) {
  RINGCOMM_STEP("before memory is sent");
  DescriptorMessage message;
  cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  if (::sendmsg(socket, &message.header, MSG_NOSIGNAL) < 0)
    throw_errno("sendmsg of a file descriptor");
}

UniqueFd recv_fd(int socket, std::chrono::milliseconds timeout) {
  RINGCOMM_STEP("before memory is received");
  if (!is_readable(socket, timeout)) return UniqueFd();
  DescriptorMessage message;
  if (::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC) <= 0) return UniqueFd();
  UniqueFd received;
  if (cmsghdr* header = CMSG_FIRSTHDR(&message.header);
      header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
    received.reset(fd);
  }
  if ((message.header.msg_flags & MSG_CTRUNC) == 0) return received;
  if (received) return UniqueFd();  // there were more
  errno = EMFILE;
  throw_errno("recvmsg of a file descriptor");
}

}  // namespace ringcomm::shm
