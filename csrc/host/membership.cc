#include "host/membership.h"

#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>

#include "core/types.h"
#include "host/fd.h"
#include "host/group.h"
#include "host/shared_arena.h"

namespace ringcomm {
namespace {

// The fields of /proc/PID/stat from the third on, the state; empty if the kernel does not tell.
std::vector<std::string> stat_of(pid_t pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  // "pid (name) state ...", and the name may hold anything.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(stat.substr(name_end + 1));
  return {std::istream_iterator<std::string>(fields), {}};
}

// The status, as wait() gives it, of a process that ends, or has ended and is not reaped; none if
// it runs on.
std::optional<int> status_of_ending(const std::vector<std::string>& fields) {
  constexpr std::size_t kFlags = 6, kExitCode = 49;  // behind the state
  constexpr unsigned long kIsExiting = 4;            // PF_EXITING
  if (fields.size() <= kExitCode) return {};
  if ((std::strtoul(fields[kFlags].c_str(), nullptr, 10) & kIsExiting) == 0) return {};
  return static_cast<int>(std::strtol(fields[kExitCode].c_str(), nullptr, 10));
}

// The same of a process that its parent has reaped; from Linux 6.15 on.
std::optional<int> status_of_reaped(int pidfd) {
  constexpr std::uint64_t kExitInfo = 1 << 3;  // PIDFD_INFO_EXIT in linux/pidfd.h
  struct {
    std::uint64_t mask = kExitInfo;
    std::uint64_t cgroup = 0;
    std::uint32_t ids[11] = {};
    std::int32_t exit_code = 0;
  } info;
  static_assert(sizeof(info) == 64);
  if (pidfd < 0 || ::ioctl(pidfd, _IOWR(0xFF, 11, decltype(info)), &info) != 0) return {};
  if ((info.mask & kExitInfo) == 0) return {};
  return info.exit_code;
}

// Texts in the store have the length of each field in front of it: a field may hold anything.
std::string to_fields(std::initializer_list<std::string> fields) {
  std::string text;
  for (const std::string& field : fields) text += std::to_string(field.size()) + ":" + field;
  return text;
}

class Fields {
 public:
  explicit Fields(std::string text) : text_(std::move(text)) {}
  std::string next() {
    const std::size_t num_chars = std::strtoull(text_.c_str(), nullptr, 10);
    text_.erase(0, text_.find(':'));
    const std::string field = text_.empty() ? "" : text_.substr(1, num_chars);
    text_.erase(0, 1 + field.size());
    return field;
  }
  int number() { return static_cast<int>(std::strtol(next().c_str(), nullptr, 10)); }

 private:
  std::string text_;
};

// Ranks that share memory or exchange headers must have the same sizes and enum values. Increase
// the number after the name for a change that these do not show.
std::string version() {
  std::string text = "ringcomm-12-" RINGCOMM_VERSION;
  for (const std::size_t number :
       {sizeof(shm::AbortRecord), sizeof(shm::RankControl), sizeof(LinkCursors), kCallHeaderBytes,
        std::size_t{kNumDTypes}, std::size_t{kNumReductions}})
    text += "-" + std::to_string(number);
  return text;
}

// The number of this process's namespace of that kind; empty where the kernel does not tell.
std::string namespace_of(const std::string& kind) {
  struct stat found{};
  const bool is_known = ::stat(("/proc/self/ns/" + kind).c_str(), &found) == 0;
  return is_known ? std::to_string(found.st_ino) : "";
}

std::string boot_and_network() {
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  const std::string network = namespace_of("net");
  return network.empty() ? boot_id : boot_id + ":net" + network;
}

// For messages, which must be a line of valid text in Python.
std::string printable(std::string text) {
  for (char& letter : text)
    if (letter < ' ' || letter > '~') letter = '?';
  return text;
}

}  // namespace

constinit std::atomic<std::uint64_t> PeerProcess::num_ended = 0;
constinit std::atomic<int> PeerProcess::death_event = -1;

bool PeerProcess::is_stopped() const {
  if (bootstrap_address.empty() || is_pid_hidden || is_dead) return false;
  const std::vector<std::string> fields = stat_of(pid);
  return !fields.empty() && (fields[0] == "T" || fields[0] == "t");
}

std::optional<std::uint64_t> PeerProcess::cpu_ms() const {
  constexpr std::size_t kUserTime = 11, kSystemTime = 12;  // behind the state
  if (bootstrap_address.empty() || is_pid_hidden || is_dead) return {};
  const std::vector<std::string> fields = stat_of(pid);
  if (fields.size() <= kSystemTime) return {};
  const auto ticks = std::strtoull(fields[kUserTime].c_str(), nullptr, 10) +
                     std::strtoull(fields[kSystemTime].c_str(), nullptr, 10);
  return 1000 * ticks / static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
}

std::string PeerProcess::last_words() const {
  const std::lock_guard lock(mutex_);
  return last_words_;
}

void PeerProcess::keep_last_words(std::string words) {
  const std::lock_guard lock(mutex_);
  last_words_ = printable(std::move(words));
}

std::string PeerProcess::refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

void PeerProcess::keep_refusal(std::string why) {
  const std::lock_guard lock(mutex_);
  refusal_ = printable(std::move(why));
}

void PeerProcess::end(int pidfd) {
  if (!is_pid_hidden) {
    // Its parent may reap it between the two questions, but not a second time.
    const std::vector<std::string> fields = stat_of(pid);
    std::optional<int> status = status_of_ending(fields);
    if (!fields.empty() && !status && gone == Gone::kEnded) gone = Gone::kRunsOn;
    if (!status) status = status_of_reaped(pidfd);
    if (status) wait_status = *status;
    if (status && WIFEXITED(*status)) has_exited = true;
  }
  is_dead = true;
  num_ended.fetch_add(1);
  if (const int event = death_event; event >= 0) ::eventfd_write(event, 1);
}

std::string PeerProcess::how_it_ended(const std::string& when, const std::string& detail) const {
  const std::string words = last_words();
  const int status = wait_status;
  std::string text;
  if (words.empty() && has_exited) {
    const bool is_known = status >= 0 && WIFEXITED(status);
    text = " has exited" +
           (is_known ? " with code " + std::to_string(WEXITSTATUS(status)) : std::string()) + when;
  } else if (words.empty() && gone == Gone::kRunsOn) {
    return " is no longer a rank" + when +
           ": its process runs, and has called exec() or closed all descriptors";
  } else if (words.empty() && gone == Gone::kUnwatched) {
    return " can no longer be watched" + when + ": a library has closed descriptors of this rank";
  } else {
    text = " died" + when;
    if (status >= 0 && WIFSIGNALED(status))
      text += " (signal " + std::to_string(WTERMSIG(status)) + ", " +
              ::strsignal(WTERMSIG(status)) + ")";
    else if (!detail.empty())
      text += " (" + detail + ")";
  }
  return text + (words.empty() ? "; read the end of its output" : ": " + words);
}

std::shared_ptr<const shm::SharedMemory> PeerProcess::flight() const {
  const std::lock_guard lock(mutex_);
  return flight_;
}

void PeerProcess::keep_flight(int fd) {
  auto mapped = std::make_shared<const shm::SharedMemory>(shm::SharedMemory::of_peer(fd));
  const std::lock_guard lock(mutex_);
  flight_ = std::move(mapped);
}

std::shared_ptr<shm::PeerMemory> PeerProcess::memory() const {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<shm::PeerMemory> memory = memory_.lock();
  if (memory == nullptr) memory_ = memory = std::make_shared<shm::PeerMemory>(bootstrap_address);
  return memory;
}

std::string prefix_of(int rank, int world_size, int global_rank) {
  const std::string place = std::to_string(rank) + "/" + std::to_string(world_size);
  return "ringcomm rank " + place +
         (global_rank < 0 || global_rank == rank
              ? ": "
              : " (global rank " + std::to_string(global_rank) + "): ");
}

std::string name_of_process(int rank, int global_rank, const PeerProcess& process) {
  const bool has_other = global_rank >= 0 && global_rank != rank;
  std::string more = has_other ? "global rank " + std::to_string(global_rank) : "";
  if (process.pid >= 0)
    more += (has_other ? ", pid " : "pid ") + std::to_string(process.pid) +
            (process.is_pid_hidden ? " of another PID namespace" : "") + " on " + process.host;
  return "rank " + std::to_string(rank) + (has_other ? " of the group" : "") +
         (more.empty() ? "" : " (" + more + ")");
}

AbortReason AbortReason::of(const std::exception& error, int origin) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return {.kind = known != nullptr ? known->info().kind : ErrorKind::kAborted,
          .origin = origin,
          .culprit = known != nullptr ? known->info().rank : origin,
          .text = error.what()};
}

std::string AbortReason::to_text() const {
  return to_fields({std::to_string(static_cast<int>(kind)), std::to_string(origin),
                    std::to_string(culprit), text});
}

AbortReason AbortReason::from_text(const std::string& text) {
  Fields fields(text);
  return {.kind = static_cast<ErrorKind>(fields.number()),
          .origin = fields.number(),
          .culprit = fields.number(),
          .text = fields.next()};
}

std::string RankRecord::to_text() const {
  return version() + "\n" +
         to_fields({host_id, host, bootstrap_address, std::to_string(pid), memory_key, options,
                    machine_id, std::to_string(world_size), global_ranks, pid_namespace,
                    std::to_string(attempt), failure.to_text()});
}

RankRecord RankRecord::from_text(const std::string& text) {
  const std::string head = version() + "\n";
  if (!text.starts_with(head))
    throw Error({.kind = ErrorKind::kMismatch},
                "ringcomm: another rank runs a different version of ringcomm (" +
                    text.substr(0, text.find('\n')) + " there, " + version() +
                    " here); install the same version");
  Fields fields(text.substr(head.size()));
  return {.host_id = fields.next(),
          .host = fields.next(),
          .bootstrap_address = fields.next(),
          .pid = fields.number(),
          .memory_key = fields.next(),
          .options = fields.next(),
          .machine_id = fields.next(),
          .world_size = fields.number(),
          .global_ranks = fields.next(),
          .pid_namespace = fields.next(),
          .attempt = fields.number(),
          .failure = AbortReason::from_text(fields.next())};
}

std::string host_id() {
  const char* forced = std::getenv("RINGCOMM_HOST_ID");
  return forced != nullptr && *forced != '\0' ? forced : boot_and_network();
}

std::string machine_id() { return boot_and_network() + ":uid" + std::to_string(::geteuid()); }

std::string pid_namespace() { return namespace_of("pid"); }

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown host";
  return printable(name.data());
}

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
