#pragma once

#include <cstddef>
#include <map>
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
  explicit PeerTable(const std::vector<RankRecord>& records) {
    std::map<std::string, int> known;
    for (const RankRecord& record : records) {
      const auto [found, is_new] = known.try_emplace(record.host_id, num_hosts());
      if (is_new) {
        names_.push_back(record.host);
        hosts_.emplace_back();
      }
      std::vector<int>& ranks = hosts_[static_cast<std::size_t>(found->second)];
      const int rank = world_size();
      places_.emplace_back(found->second, static_cast<int>(ranks.size()));
      ranks.push_back(rank);
    }
  }

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
  int leader_of(int host) const { return ranks_on(host).front(); }

  /// "2 hosts: alpha (ranks 0 2), beta (rank 1)"
  std::string describe() const {
    std::string text = std::to_string(num_hosts()) + (num_hosts() == 1 ? " host: " : " hosts: ");
    for (int host = 0; host < num_hosts(); ++host) {
      if (host > 0) text += ", ";
      text += names_[static_cast<std::size_t>(host)];
      text += num_ranks_on(host) == 1 ? " (rank" : " (ranks";
      for (const int rank : ranks_on(host)) text += " " + std::to_string(rank);
      text += ")";
    }
    return text;
  }

 private:
  std::vector<std::string> names_;           // of hosts
  std::vector<std::vector<int>> hosts_;      // their ranks
  std::vector<std::pair<int, int>> places_;  // by rank: host, and rank there
};

}  // namespace ringcomm
