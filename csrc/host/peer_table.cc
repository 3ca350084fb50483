#include "host/peer_table.h"

#include <map>

namespace ringcomm {

PeerTable::PeerTable(const std::vector<RankRecord>& records) {
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

std::string PeerTable::describe() const {
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

}  // namespace ringcomm
