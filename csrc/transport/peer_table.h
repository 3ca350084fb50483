#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "transport/membership.h"

namespace ringcomm {

/// The size of what the collectives put in front of their data (CallHeader, which asserts it):
/// ranks compare it in their records.
inline constexpr std::size_t kCallHeaderBytes = 104;

/// The record that each rank publishes in the store before ranks share memory.
struct RankRecord {
  std::string host_id;            ///< equal for processes that share memory with each other
  std::string host;               ///< its name, for messages
  std::string bootstrap_address;  ///< where its bootstrap listens
  pid_t pid = -1;
  std::string memory_key;  ///< names memory that it may offer for this group
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

/// The ranks of a group and their hosts, from the ranks' records. Equal on all ranks.
///
/// Hosts are numbered in the order of their first ranks; ranks may be on hosts in any order.
class PeerTable {
 public:
  /// `records` are indexed by rank; at least one.
  explicit PeerTable(std::vector<RankRecord> records);

  int world_size() const { return static_cast<int>(records_.size()); }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  /// The ranks of a host, ascending.
  const std::vector<int>& ranks_on(int host) const {
    return hosts_[static_cast<std::size_t>(host)];
  }
  int num_ranks_on(int host) const { return static_cast<int>(ranks_on(host).size()); }
  int host_of(int rank) const { return places_[static_cast<std::size_t>(rank)].first; }
  /// The index of `rank` among the ranks of its host.
  int local_rank_of(int rank) const { return places_[static_cast<std::size_t>(rank)].second; }
  /// The first rank of a host.
  int leader_of(int host) const { return ranks_on(host).front(); }

  /// "2 hosts: alpha (ranks 0 2), beta (rank 1)"
  std::string describe() const;

 private:
  std::vector<RankRecord> records_;
  std::vector<std::vector<int>> hosts_;
  std::vector<std::pair<int, int>> places_;  // by rank: host, and rank there
};

}  // namespace ringcomm
