#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "transport/membership.h"

namespace ringcomm::shm {

/// The size of what the collectives put in front of their data (CallHeader, which asserts it):
/// ranks compare it in their records.
inline constexpr std::size_t kCallHeaderBytes = 104;

/// The record that each rank publishes in the store before ranks share memory.
struct RankRecord {
  std::string host_id;            ///< equal for processes that share memory with each other
  std::string host;               ///< its name, for messages
  std::string bootstrap_address;  ///< where its bootstrap listens
  pid_t pid = -1;
  std::string memory_key;  ///< of rank 0: under what it offers the memory
  std::string options;
  std::string machine_id = {};  ///< equal for processes that can watch each other
  int world_size = 0;           ///< of the group that it makes
  AbortReason failure = {};     ///< why it could not make it; without a text until it fails

  std::string to_text() const;
  /// Throws Error if the text is not such a record (the other rank has another version of
  /// ringcomm).
  static RankRecord from_text(const std::string& text);
};

/// The boot and the network namespace of this process: abstract Unix sockets reach no further.
/// RINGCOMM_HOST_ID in the environment replaces it.
std::string host_id();
/// The machine and the user, independent of the environment: a bootstrap answers its own user only.
std::string machine_id();
std::string host_name();

}  // namespace ringcomm::shm
