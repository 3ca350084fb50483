#include "transport/peer_table.h"

#include <algorithm>
#include <map>

namespace ringcomm {

PeerTable::PeerTable(std::vector<shm::RankRecord> records) : records_(std::move(records)) {
  std::map<std::string, int> known;
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto [found, is_new] = known.try_emplace(record_of(rank).host_id, num_hosts());
    if (is_new) hosts_.emplace_back();
    std::vector<int>& ranks = hosts_[static_cast<std::size_t>(found->second)];
    places_.emplace_back(found->second, static_cast<int>(ranks.size()));
    ranks.push_back(rank);
  }
}

int PeerTable::max_ranks_on_a_host() const {
  std::size_t most = 0;
  for (const std::vector<int>& ranks : hosts_) most = std::max(most, ranks.size());
  return static_cast<int>(most);
}

std::string PeerTable::describe() const {
  std::string text = std::to_string(num_hosts()) + (num_hosts() == 1 ? " host: " : " hosts: ");
  for (int host = 0; host < num_hosts(); ++host) {
    if (host > 0) text += ", ";
    text += record_of(leader_of(host)).host + (num_ranks_on(host) == 1 ? " (rank" : " (ranks");
    for (const int rank : ranks_on(host)) text += " " + std::to_string(rank);
    text += ")";
  }
  return text;
}

}  // namespace ringcomm
