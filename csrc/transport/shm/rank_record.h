#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace ringcomm::shm {

/// The size of what the collectives put in front of their data (CallHeader, which asserts it):
/// ranks compare it in their records.
inline constexpr std::size_t kCallHeaderBytes = 112;

/// What a rank tells the others through the store before they share memory.
struct RankRecord {
  std::string host_id;      ///< equal for processes that share memory with each other
  std::string host;         ///< its name, for messages
  std::string hub_address;  ///< where its hub listens
  pid_t pid = -1;
  std::string memory_key;  ///< of rank 0: under what it offers the memory
  std::string options;
  std::string machine_id = {};  ///< equal for processes that can watch each other
  int world_size = 0;           ///< of the group that it makes

  std::string to_text() const;
  /// Throws Error when the text is not such a record (another version of ringcomm on the other
  /// side).
  static RankRecord from_text(const std::string& text);
};

/// The boot and the network namespace of this process: abstract Unix sockets reach no further.
/// RINGCOMM_HOST_ID in the environment replaces it.
std::string host_id();
/// The same and the user, whatever the environment says: hubs answer their own user alone.
std::string machine_id();
std::string host_name();

}  // namespace ringcomm::shm
