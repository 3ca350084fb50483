#include "transport/shm/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "core/annotations.h"
#include "core/errors.h"
#include "transport/shm/system_error.h"
#include "transport/wait_limits.h"

namespace ringcomm::shm {
namespace {

constexpr std::size_t kMaxTextBytes = 256;

UniqueFd open_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("socket(AF_UNIX)");
  return fd;
}

struct Address {
  sockaddr_un value{};
  socklen_t num_bytes = 0;
};

Address abstract_address(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  if (name.size() > sizeof(address.value.sun_path) - 1)
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: a name of " + std::to_string(name.size()) +
                                                  " bytes is too long for an abstract Unix socket");
  // A leading zero byte selects the abstract namespace: no file, and the name is freed with its
  // last descriptor.
  std::memcpy(address.value.sun_path + 1, name.data(), name.size());
  address.num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// One byte of data, which a message must have, and a descriptor. The object points into itself, so
// it must not be moved.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 1;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

}  // namespace

UniqueFd listen_at(const std::string& name) {
  UniqueFd fd = open_socket();
  const Address address = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.num_bytes) != 0)
    throw_errno("bind to the abstract Unix socket " + name);
  if (::listen(fd.get(), SOMAXCONN) != 0) throw_errno("listen at the abstract Unix socket " + name);
  return fd;
}

UniqueFd connect_to(const std::string& name) {
  RINGCOMM_STEP("before a connection");
  UniqueFd fd = open_socket();
  const Address address = abstract_address(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.num_bytes) !=
      0) {
    if (errno != ECONNREFUSED) throw_errno("connect to the abstract Unix socket " + name);
    return UniqueFd();
  }
  if (!is_trusted_peer(fd.get())) {
    const PeerCredentials peer = credentials_of_peer(fd.get());
    throw Error({.kind = ErrorKind::kSystem, .pid = peer.pid},
                "ringcomm: the process at the abstract Unix socket " + name + " (pid " +
                    std::to_string(peer.pid) + ") runs as user " + std::to_string(peer.uid) +
                    " and this one as user " + std::to_string(::geteuid()) +
                    "; run all ranks of a host as one user");
  }
  return fd;
}

PeerCredentials credentials_of_peer(int socket) {
  ucred credentials{};
  socklen_t num_bytes = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &num_bytes) != 0)
    throw_errno("getsockopt(SO_PEERCRED)");
  return {credentials.pid, credentials.uid};
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
  if ((message.header.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw_errno("recvmsg of a file descriptor");
  }
  cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
    return UniqueFd();
  // The room for one descriptor is rounded up, and may hold two: each belongs to this process now.
  const std::size_t num_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  UniqueFd received;
  for (std::size_t i = 0; i < num_fds; ++i) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    received.reset(fd);
  }
  return num_fds == 1 ? std::move(received) : UniqueFd();
}

}  // namespace ringcomm::shm
