#include "transport/shm/rank_record.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "core/errors.h"
#include "core/link_protocol.h"
#include "core/types.h"
#include "transport/shm/segment.h"

namespace ringcomm::shm {
namespace {

// Ranks that share memory or exchange headers must have the same build: one version, with the same
// sizes and enum values. Increase the number after the name for a change that these do not show.
const std::string& version() {
  static const std::string text = [] {
    std::string joined = "ringcomm-7-" RINGCOMM_VERSION;
    for (const std::size_t number :
         {sizeof(SegmentHeader), sizeof(RankControl), sizeof(LinkCursors), kCallHeaderBytes,
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
  text << version() << '\n'
       << host_id << '\n'
       << host << '\n'
       << bootstrap_address << '\n'
       << pid << '\n'
       << memory_key << '\n'
       << options << '\n'
       << machine_id << '\n'
       << world_size << '\n'
       << failure.to_text();
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
  std::getline(lines, record.host_id);
  std::getline(lines, record.host);
  std::getline(lines, record.bootstrap_address);
  std::getline(lines, pid);
  std::getline(lines, record.memory_key);
  std::getline(lines, record.options);
  std::getline(lines, record.machine_id);
  std::getline(lines, world_size);
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

}  // namespace ringcomm::shm
