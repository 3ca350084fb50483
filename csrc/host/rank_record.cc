#include "host/rank_record.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>

#include "core/link_protocol.h"
#include "host/group.h"
#include "host/peer_process.h"
#include "kernels/common/types.h"

namespace ringcomm {
namespace {

// Ranks that share memory or exchange headers must have the same sizes and enum values. Increase
// the number after the name for a change that these do not show.
std::string version() {
  std::string text = "ringcomm-17-" RINGCOMM_VERSION;
  for (const std::size_t number :
       {sizeof(host::AbortRecord), sizeof(host::RankControl), sizeof(LinkCursors), kCallHeaderBytes,
        std::size_t{kNumDTypes}, std::size_t{kNumReductions}})
    text += "-" + std::to_string(number);
  return text;
}

std::string boot_and_network() {
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  if (boot_id.empty()) boot_id = host_name();  // hidden, as on all machines of that kind
  struct stat network{};
  const bool is_known = ::stat("/proc/self/ns/net", &network) == 0;
  return boot_id + (is_known ? ":net" + std::to_string(network.st_ino) : "");
}

}  // namespace

std::string RankRecord::to_text() const {
  return version() + "\n" +
         to_fields({host_id, host, bootstrap_address, std::to_string(pid), memory_key, options,
                    machine_id, std::to_string(world_size), global_ranks, std::to_string(attempt),
                    cores, std::to_string(written_ms), failure.to_text()});
}

RankRecord RankRecord::from_text(const std::string& text) {
  const std::string head = version() + "\n";
  if (!text.starts_with(head))
    throw Error({.kind = ErrorKind::kMismatch},
                "ringcomm: another rank runs a different version of ringcomm (" +
                    text.substr(0, text.find('\n')) + " there, " + version() +
                    " here); install the same version");
  TextFields fields(text.substr(head.size()));
  return {.host_id = fields.next(),
          .host = fields.next(),
          .bootstrap_address = fields.next(),
          .pid = fields.number(),
          .memory_key = fields.next(),
          .options = fields.next(),
          .machine_id = fields.next(),
          .world_size = fields.number(),
          .global_ranks = fields.next(),
          .attempt = fields.number(),
          .cores = fields.next(),
          .written_ms = fields.number<std::int64_t>(),
          .failure = AbortReason::from_text(fields.next())};
}

void check_same_group(const RankRecord& mine, int rank, const RankRecord& theirs, int peer,
                      bool may_join, bool is_one_host) {
  const auto throw_different = [&](ErrorKind kind, const std::string& text) {
    throw Error(
        {.kind = kind, .rank = peer, .pid = theirs.pid, .host = theirs.host, .op = "init"},
        "ringcomm: rank " + std::to_string(rank) + " and rank " + std::to_string(peer) + text);
  };
  if (mine.world_size != theirs.world_size)
    throw_different(ErrorKind::kMismatch,
                    " made a group of different sizes: " + std::to_string(mine.world_size) +
                        " and " + std::to_string(theirs.world_size) +
                        " ranks; start all ranks with the same world size");
  if (mine.global_ranks != theirs.global_ranks)
    throw_different(ErrorKind::kMismatch,
                    " made groups of different ranks under one name: the global ranks {" +
                        mine.global_ranks + "} and {" + theirs.global_ranks +
                        "}; let all ranks call new_group() for all groups, in the same order");
  if (!may_join) return;
  if (is_one_host && mine.host_id != theirs.host_id)
    throw_different(
        ErrorKind::kSystem,
        " share no memory: host " + mine.host + " [" + mine.host_id + "] and host " + theirs.host +
            " [" + theirs.host_id +
            "]; the shm transport needs all ranks of a group on one host and in one network "
            "namespace; transport=None also supports several hosts, over messages");
  if (mine.options != theirs.options)
    throw_different(ErrorKind::kMismatch, " made the group with different options: {" +
                                              mine.options + "} and {" + theirs.options + "}");
}

std::string host_id() {
  const char* forced = std::getenv("RINGCOMM_HOST_ID");
  return forced != nullptr && *forced != '\0' ? forced : boot_and_network();
}

std::string machine_id() { return boot_and_network() + ":uid" + std::to_string(::geteuid()); }

std::string ranges_of(const std::vector<std::uint64_t>& numbers) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < numbers.size(); begin = end) {
    for (end = begin + 1; end < numbers.size() && numbers[end] == numbers[end - 1] + 1;) ++end;
    if (begin > 0) text += ", ";
    text += std::to_string(numbers[begin]);
    if (end > begin + 1) text += "-" + std::to_string(numbers[end - 1]);
  }
  return text;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown host";
  return printable(name.data());
}

}  // namespace ringcomm
