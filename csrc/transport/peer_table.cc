#include "transport/peer_table.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "core/types.h"
#include "transport/shm/group.h"

namespace ringcomm {
namespace {

// Ranks that share memory or exchange headers must have the same build: one version, with the same
// sizes and enum values. Increase the number after the name for a change that these do not show.
const std::string& version() {
  static const std::string text = [] {
    std::string joined = "ringcomm-8-" RINGCOMM_VERSION;
    for (const std::size_t number :
         {sizeof(shm::AbortRecord), sizeof(shm::RankControl), sizeof(LinkCursors), kCallHeaderBytes,
          std::size_t{kNumDTypes}, std::size_t{kNumReductions}})
      joined += "-" + std::to_string(number);
    return joined;
  }();
  return text;
}

std::string boot_and_network() {
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  struct stat network{};
  if (::stat("/proc/self/ns/net", &network) == 0)
    boot_id += ":net" + std::to_string(network.st_ino);
  return boot_id;
}

}  // namespace

std::string RankRecord::to_text() const {
  std::ostringstream text;
  for (const std::string& line : {version(), host_id, host, bootstrap_address, std::to_string(pid),
                                  memory_key, options, machine_id, std::to_string(world_size)})
    text << line << '\n';
  text << failure.to_text();
  return text.str();
}

RankRecord RankRecord::from_text(const std::string& text) {
  std::istringstream lines(text);
  std::string theirs, pid, world_size;
  RankRecord record;
  std::getline(lines, theirs);
  if (theirs != version())
    throw Error({.kind = ErrorKind::kMismatch},
                "ringcomm: another rank runs a different version of ringcomm (" + theirs +
                    " there, " + version() + " here); install the same version");
  for (std::string* line : {&record.host_id, &record.host, &record.bootstrap_address, &pid,
                            &record.memory_key, &record.options, &record.machine_id, &world_size})
    std::getline(lines, *line);
  record.failure = AbortReason::from_text({std::istreambuf_iterator<char>(lines), {}});
  record.pid = static_cast<pid_t>(std::strtol(pid.c_str(), nullptr, 10));
  record.world_size = static_cast<int>(std::strtol(world_size.c_str(), nullptr, 10));
  return record;
}

std::string host_id() {
  if (const char* forced = std::getenv("RINGCOMM_HOST_ID"); forced != nullptr && *forced != '\0')
    return forced;
  return boot_and_network();
}

std::string machine_id() { return boot_and_network() + ":uid" + std::to_string(::geteuid()); }

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

PeerTable::PeerTable(std::vector<RankRecord> records) : records_(std::move(records)) {
  std::map<std::string, int> known;
  for (int rank = 0; rank < world_size(); ++rank) {
    const std::string& host_id = records_[static_cast<std::size_t>(rank)].host_id;
    const auto [found, is_new] = known.try_emplace(host_id, num_hosts());
    if (is_new) hosts_.emplace_back();
    std::vector<int>& ranks = hosts_[static_cast<std::size_t>(found->second)];
    places_.emplace_back(found->second, static_cast<int>(ranks.size()));
    ranks.push_back(rank);
  }
}

std::string PeerTable::describe() const {
  std::string text = std::to_string(num_hosts()) + (num_hosts() == 1 ? " host: " : " hosts: ");
  for (int host = 0; host < num_hosts(); ++host) {
    if (host > 0) text += ", ";
    text += records_[static_cast<std::size_t>(leader_of(host))].host;
    text += num_ranks_on(host) == 1 ? " (rank" : " (ranks";
    for (const int rank : ranks_on(host)) text += " " + std::to_string(rank);
    text += ")";
  }
  return text;
}

}  // namespace ringcomm
