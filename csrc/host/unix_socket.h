#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include "host/fd.h"

// Sockets for sequenced packets, in the abstract namespace. Any user can take a name that is free,
// so both ends check that the other runs as the same user or root. All of it throws Error.

namespace ringcomm::host {

/// A socket that listens at `name`.
UniqueFd listen_at(const std::string& name);
/// A socket connected to `name`. None, and errno, ECONNREFUSED when no process listens there,
/// EAGAIN when more wait to be accepted there than the system allows, after kCheckInterval. Throws
/// for another user's.
UniqueFd connect_to(const std::string& name);

ucred credentials_of_peer(int socket);
/// Why the other end may not be a process of this one's user, or of root; empty if it is.
std::string why_untrusted(int socket);

/// Whether a message, or the end of the connection, arrived in time (days at most).
bool is_readable(int socket, std::chrono::milliseconds timeout);

inline constexpr std::size_t kMaxTextBytes = 512;

struct SocketMessage {
  std::string text;
  UniqueFd fd;
  bool has_lost_fd = false;  ///< this process had no room for it
};
/// Sends a text, which is not empty, and a descriptor unless `fd` is -1. Returns the system's
/// error, or 0; send_message() throws it.
int try_send(int socket, std::string text, int fd = -1);
void send_message(int socket, std::string text, int fd = -1);
/// Nothing if none has arrived. An empty text if the other end is closed or sent too much; no
/// descriptor if it sent none or several.
std::optional<SocketMessage> recv_message(int socket);

}  // namespace ringcomm::host
