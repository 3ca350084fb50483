#include "transport/shm/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>

#include "transport/shm/system_error.h"

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
  // A leading zero byte marks the abstract namespace: no file, gone with its last descriptor.
  std::memcpy(address.value.sun_path + 1, name.data(),
              std::min(name.size(), sizeof(address.value.sun_path) - 1));
  address.num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// Room for one byte, without which nothing is sent, and the descriptor that goes with it. Points
// into itself, so it stays where it is.
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

bool is_readable(int socket, std::chrono::milliseconds timeout) {
  pollfd entry{.fd = socket, .events = POLLIN, .revents = 0};
  const auto timeout_ms = static_cast<int>(
      std::min<std::chrono::milliseconds::rep>(timeout.count(), std::numeric_limits<int>::max()));
  for (;;) {
    const int ready = ::poll(&entry, 1, timeout_ms);
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) throw_errno("poll of a Unix socket");
  }
}

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
  UniqueFd fd = open_socket();
  const Address address = abstract_address(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.value), address.num_bytes) ==
      0)
    return fd;
  if (errno != ECONNREFUSED) throw_errno("connect to the abstract Unix socket " + name);
  return UniqueFd();
}

PeerCredentials credentials_of_peer(int socket) {
  ucred credentials{};
  socklen_t num_bytes = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &num_bytes) != 0)
    throw_errno("getsockopt(SO_PEERCRED)");
  return {credentials.pid, credentials.uid};
}

void send_text(int socket, const std::string& text) {
  if (::send(socket, text.data(), text.size(), MSG_NOSIGNAL) < 0)
    throw_errno("send on a Unix socket");
}

bool recv_text(int socket, std::chrono::milliseconds timeout, std::string& text) {
  if (!is_readable(socket, timeout)) return false;
  std::array<char, kMaxTextBytes> buffer;
  const ssize_t num_bytes = ::recv(socket, buffer.data(), buffer.size(), 0);
  text.assign(buffer.data(), num_bytes > 0 ? static_cast<std::size_t>(num_bytes) : 0);
  return true;
}

void send_fd(int socket, int fd) {
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
  if (!is_readable(socket, timeout)) return UniqueFd();
  DescriptorMessage message;
  if (::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC) <= 0) return UniqueFd();
  if ((message.header.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;
    throw_errno("recvmsg of a file descriptor");
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return UniqueFd();
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return UniqueFd(fd);
}

}  // namespace ringcomm::shm
