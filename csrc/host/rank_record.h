#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host/abort_reason.h"

namespace ringcomm {

/// The size of CallHeader (which asserts it): ranks compare it in their records.
inline constexpr std::size_t kCallHeaderBytes = 104;

/// The record that each rank publishes in the store before ranks share memory.
struct RankRecord {
  std::string host_id;                 ///< equal for processes that share memory with each other
  std::string host;                    ///< its name, for messages
  std::string bootstrap_address = {};  ///< where its bootstrap listens, and its secrets
  pid_t pid = -1;
  std::string memory_key = {};  ///< random; names memory that it may offer for this group
  std::string options;
  std::string machine_id = {};    ///< equal for processes that can watch each other
  int world_size = 0;             ///< of the group that it makes
  std::string global_ranks = {};  ///< of that group, as text; empty where it has no such numbers
  int attempt = 1;                ///< how often it has begun to make this group over this store
  std::string cores = {};         ///< that it may use; empty where that is not known
  std::int64_t written_ms = 0;    ///< when, by the system's clock, since 1970
  AbortReason failure = {};       ///< why it could not make it; without a text until it fails

  std::string to_text() const;
  /// Throws Error if the text is not a record of this version of ringcomm.
  static RankRecord from_text(const std::string& text);
};

/// "0-3, 8" of ascending numbers.
std::string ranges_of(const std::vector<std::uint64_t>& numbers);

/// The boot and the network namespace of this process: abstract Unix sockets reach no further.
/// RINGCOMM_HOST_ID replaces it.
std::string host_id();
/// The same whatever RINGCOMM_HOST_ID is, and the user: a bootstrap answers its own user only.
std::string machine_id();
/// Of this machine; letters that are not of ASCII are ?.
std::string host_name();

}  // namespace ringcomm
