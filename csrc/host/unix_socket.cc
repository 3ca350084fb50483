#include "host/unix_socket.h"

#include <poll.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/annotations.h"
#include "core/errors.h"
#include "host/process.h"
#include "host/wait.h"

namespace ringcomm::host {
namespace {

// A socket, and `call` (bind or connect) on it with `name`; errno is 0 if that succeeded.
UniqueFd open_socket(const std::string& name, int (*call)(int, const sockaddr*, socklen_t)) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("socket(AF_UNIX)");
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (name.size() > sizeof(address.sun_path) - 1)
    throw Error({.kind = ErrorKind::kSystem}, "ringcomm: a name of " + std::to_string(name.size()) +
                                                  " bytes is too long for an abstract Unix socket");
  // A leading zero byte selects the abstract namespace, of names without files.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  // Where connections wait in a full queue, connect() waits so long.
  const timeval patience{.tv_sec = 0, .tv_usec = std::chrono::microseconds(kCheckInterval).count()};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  errno = 0;
  call(fd.get(), reinterpret_cast<const sockaddr*>(&address), num_bytes);
  return fd;
}

// A text and room for one descriptor, as the system takes them; points into itself.
struct Envelope {
  Envelope(char* text, std::size_t num_bytes) : data{.iov_base = text, .iov_len = num_bytes} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = CMSG_LEN(sizeof(int));
  }
  Envelope(const Envelope&) = delete;
  Envelope& operator=(const Envelope&) = delete;

  iovec data;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

// Whether `uid` may stand for any user: in a user namespace, as of a container, all users that it
// does not map look like the overflow uid.
bool is_ambiguous(uid_t uid) {
  static const uid_t overflow = [] {
    uid_t found = 65534;
    std::ifstream("/proc/sys/kernel/overflowuid") >> found;
    return found;
  }();
  if (uid != overflow) return false;
  std::uint64_t inside = 0, outside = 0, num_mapped = 0, num_users = 0;
  for (std::ifstream map("/proc/self/uid_map"); map >> inside >> outside >> num_mapped;)
    num_users += num_mapped;
  return num_users < UINT32_MAX;
}

}  // namespace

UniqueFd listen_at(const std::string& name) {
  UniqueFd fd = open_socket(name, ::bind);
  if (errno != 0) throw_errno("bind to the abstract Unix socket " + name);
  if (::listen(fd.get(), SOMAXCONN) != 0) throw_errno("listen at the abstract Unix socket " + name);
  return fd;
}

UniqueFd connect_to(const std::string& name) {
  RINGCOMM_STEP("before a connection");
  UniqueFd fd = open_socket(name, ::connect);
  if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) {
    if (errno == EINTR) errno = EAGAIN;
    fd.reset();
    return fd;
  }
  if (errno != 0) throw_errno("connect to the abstract Unix socket " + name);
  const std::string why = why_untrusted(fd.get());
  if (why.empty()) return fd;
  const pid_t pid = credentials_of_peer(fd.get()).pid;
  throw Error({.kind = ErrorKind::kSystem, .pid = pid},
              "ringcomm: the process at the abstract Unix socket " + name + " (pid " +
                  std::to_string(pid) + ") " + why);
}

ucred credentials_of_peer(int socket) {
  ucred credentials{};
  socklen_t num_bytes = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &num_bytes) != 0)
    throw_errno("getsockopt(SO_PEERCRED)");
  return credentials;
}

bool is_readable(int socket, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd entry{.fd = socket, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&entry, 1, std::max(0, static_cast<int>(left.count())));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) throw_errno("poll of a Unix socket");
  }
}

std::string why_untrusted(int socket) {
  const ucred peer = credentials_of_peer(socket);
  const std::string user = std::to_string(peer.uid);
  if (is_ambiguous(peer.uid)) {
    // Whom a process may send a signal is of its user, or of the container whose root it is.
    if (peer.pid > 0 && ::kill(peer.pid, 0) == 0) return {};
    return "runs as a user that this container does not know (its user namespace shows it as " +
           user +
           "): any user of the machine looks like that; run the ranks in one container, or as a "
           "user that is mapped there (/proc/self/uid_map)";
  }
  // Root may read this process's memory anyway, and ranks may drop root after the rendezvous.
  if (peer.uid == ::geteuid() || peer.uid == 0) return {};
  return "runs as user " + user + " and this one as user " + std::to_string(::geteuid()) +
         "; run all ranks of a host as one user";
}

int try_send(int socket, std::string text, int fd) {
  Envelope envelope(text.data(), text.size());
  if (fd < 0) {
    envelope.header.msg_controllen = 0;
  } else {
    cmsghdr* header = CMSG_FIRSTHDR(&envelope.header);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  ssize_t num_bytes = 0;
  do {
    num_bytes = ::sendmsg(socket, &envelope.header, MSG_NOSIGNAL);
  } while (num_bytes < 0 && errno == EINTR);
  return num_bytes < 0 ? errno : 0;
}

void send_message(int socket, std::string text, int fd) {
  errno = try_send(socket, std::move(text), fd);
  if (errno != 0) throw_errno("send on a Unix socket");
}

std::optional<SocketMessage> recv_message(int socket) {
  std::array<char, kMaxTextBytes> buffer;
  Envelope envelope(buffer.data(), buffer.size());
  SocketMessage message;
  ssize_t num_bytes = 0;
  do {
    num_bytes = ::recvmsg(socket, &envelope.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    // What an end that was closed has sent before comes after the error.
  } while (num_bytes < 0 && (errno == EINTR || errno == ECONNRESET));
  if (num_bytes < 0 && errno == EAGAIN) return std::nullopt;
  if (num_bytes < 0) throw_errno("recvmsg on a Unix socket");
  if (num_bytes == 0) return message;
  if (cmsghdr* header = CMSG_FIRSTHDR(&envelope.header);
      header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
    message.fd.reset(fd);
  }
  if ((envelope.header.msg_flags & MSG_CTRUNC) != 0) {
    message.has_lost_fd = !message.fd;
    message.fd.reset();  // there were more
  }
  if ((envelope.header.msg_flags & MSG_TRUNC) == 0)
    message.text.assign(buffer.data(), static_cast<std::size_t>(num_bytes));
  return message;
}

}  // namespace ringcomm::host
