#include "host/peer_process.h"

#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>

#include "host/shared_arena.h"

namespace ringcomm {
namespace {

// The fields of /proc/PID/stat from the third on, the state; empty if the kernel does not tell.
std::vector<std::string> stat_of(const std::string& pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + pid + "/stat"), stat);
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

// "rank 1", "ranks 1 and 2", "ranks 1, 2 and 3"; of more than eight "... and 5 more"
std::string list_of(const char* noun, const std::vector<int>& ranks) {
  std::string text = std::string(noun) + (ranks.size() == 1 ? " " : "s ");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 8) return text + " and " + std::to_string(ranks.size() - i) + " more";
    if (i > 0) text += i + 1 < ranks.size() ? ", " : " and ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

constinit std::atomic<std::uint64_t> PeerProcess::num_ended = 0;

bool PeerProcess::is_stopped() const {
  if (bootstrap_address.empty() || is_pid_hidden || is_dead) return false;
  const std::vector<std::string> fields = stat_of(std::to_string(pid));
  return !fields.empty() && (fields[0] == "T" || fields[0] == "t");
}

std::optional<std::uint64_t> PeerProcess::cpu_ms() const {
  constexpr std::size_t kUserTime = 11, kSystemTime = 12;  // behind the state
  if (bootstrap_address.empty() || is_pid_hidden || is_dead) return {};
  const std::vector<std::string> fields = stat_of(std::to_string(pid));
  if (fields.size() <= kSystemTime) return {};
  const auto ticks = std::strtoull(fields[kUserTime].c_str(), nullptr, 10) +
                     std::strtoull(fields[kSystemTime].c_str(), nullptr, 10);
  return 1000 * ticks / static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
}

std::int64_t time_ms() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::floor<std::chrono::milliseconds>(now).count();
}

std::int64_t start_of_process_ms() {
  constexpr std::size_t kStartTime = 19;  // behind the state; since the boot
  const std::vector<std::string> fields = stat_of("self");
  timespec since_boot{};
  if (fields.size() <= kStartTime || ::clock_gettime(CLOCK_BOOTTIME, &since_boot) != 0) return 0;
  const auto ticks = std::strtoll(fields[kStartTime].c_str(), nullptr, 10);
  const auto start_ms = 1000 * ticks / ::sysconf(_SC_CLK_TCK);
  return time_ms() - (1000 * since_boot.tv_sec + since_boot.tv_nsec / 1'000'000 - start_ms);
}

void PeerProcess::end(int pidfd) {
  if (!is_pid_hidden) {
    // Its parent may reap it between the two questions, but not a second time.
    const std::vector<std::string> fields = stat_of(std::to_string(pid));
    std::optional<int> status = status_of_ending(fields);
    if (!fields.empty() && !status && gone == Gone::kEnded) gone = Gone::kRunsOn;
    if (!status) status = status_of_reaped(pidfd);
    if (status) exit_status = *status;
    if (status && WIFEXITED(*status)) has_exited = true;
  }
  is_dead = true;
  num_ended.fetch_add(1);
}

std::string PeerProcess::how_it_ended(const std::string& when, const std::string& detail) const {
  const std::string words = exit_reason();
  const int status = exit_status;
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

std::shared_ptr<host::PeerMemory> PeerProcess::memory() const {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<host::PeerMemory> memory = memory_.lock();
  if (memory == nullptr) memory_ = memory = std::make_shared<host::PeerMemory>(bootstrap_address);
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

std::string name_of_ranks(const std::vector<int>& ranks,
                          const std::vector<std::uint64_t>& global_ranks) {
  std::vector<int> others;
  for (const int rank : ranks)
    if (const auto idx = static_cast<std::size_t>(rank); idx < global_ranks.size())
      others.push_back(static_cast<int>(global_ranks[idx]));
  const bool is_alike = others == ranks || others.empty();
  return list_of("rank", ranks) +
         (is_alike ? "" : " of the group (" + list_of("global rank", others) + ")");
}

std::string printable(std::string text) {
  for (char& letter : text)
    if (letter < ' ' || letter > '~') letter = '?';
  return text;
}

}  // namespace ringcomm
