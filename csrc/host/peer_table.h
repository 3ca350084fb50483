#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "host/rank_record.h"

namespace ringcomm {

/// The hosts of a group's ranks, which may be on them in any order. The same on all ranks: hosts
/// are numbered in the order of their first ranks.
class PeerTable {
 public:
  /// `records` are indexed by rank; at least one.
  explicit PeerTable(const std::vector<RankRecord>& records);

  int world_size() const { return static_cast<int>(places_.size()); }
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
  std::vector<std::string> names_;           // of hosts
  std::vector<std::vector<int>> hosts_;      // their ranks
  std::vector<std::pair<int, int>> places_;  // by rank: host, and rank there
};

}  // namespace ringcomm
