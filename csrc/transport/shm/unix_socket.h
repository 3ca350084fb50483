#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "transport/shm/unique_fd.h"

namespace ringcomm::shm {

/// Sequenced-packet Unix sockets in the abstract namespace, and descriptors passed over them. All
/// throw Error.

/// A socket that listens at `name`.
UniqueFd listen_at(const std::string& name);
/// A socket connected to `name`; none when nobody listens there.
UniqueFd connect_to(const std::string& name);

struct PeerCredentials {
  pid_t pid;
  uid_t uid;
};
PeerCredentials credentials_of_peer(int socket);

void send_text(int socket, const std::string& text);
/// One message, or an empty text when the other end is closed. False when none came in time.
bool recv_text(int socket, std::chrono::milliseconds timeout, std::string& text);

void send_fd(int socket, int fd);
/// The descriptor of one message; none when the other end closed without sending one or nothing
/// came in time.
UniqueFd recv_fd(int socket, std::chrono::milliseconds timeout);

}  // namespace ringcomm::shm
