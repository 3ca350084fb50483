#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "transport/shm/unique_fd.h"

namespace ringcomm::shm {

/// Sequenced-packet Unix sockets in the abstract namespace, and descriptors passed over them.
/// Abstract names have no file permissions and can be taken by any user once they are free, so both
/// ends check that the other runs as the same user or root. All throw Error.

/// A socket that listens at `name`.
UniqueFd listen_at(const std::string& name);
/// A socket connected to `name`; none when no process listens there. Throws when the process that
/// listens runs as another user.
UniqueFd connect_to(const std::string& name);

struct PeerCredentials {
  pid_t pid;
  uid_t uid;
};
PeerCredentials credentials_of_peer(int socket);
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
