#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "transport/shm/rank_record.h"

namespace ringcomm {

/// The ranks of a group and their hosts, from the ranks' records. Equal on all ranks.
///
/// Hosts are numbered in the order of their first ranks; ranks may be on hosts in any order.
class PeerTable {
 public:
  /// `records` are indexed by rank; at least one.
  explicit PeerTable(std::vector<shm::RankRecord> records);

  int world_size() const { return static_cast<int>(records_.size()); }
  const shm::RankRecord& record_of(int rank) const {
    return records_[static_cast<std::size_t>(rank)];
  }

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
  int max_ranks_on_a_host() const;

  /// "2 hosts: alpha (ranks 0 2), beta (rank 1)"
  std::string describe() const;

 private:
  std::vector<shm::RankRecord> records_;
  std::vector<std::vector<int>> hosts_;
  std::vector<std::pair<int, int>> places_;  // by rank: host, and rank there
};

}  // namespace ringcomm
