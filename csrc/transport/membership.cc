#include "transport/membership.h"

#include <sys/ioctl.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

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
std::optional<int> status_of_ending(pid_t pid) {
  constexpr std::size_t kFlags = 6, kExitCode = 49;  // behind the state
  constexpr unsigned long kIsExiting = 4;            // PF_EXITING
  const std::vector<std::string> fields = stat_of(pid);
  if (fields.size() <= kExitCode) return {};
  if ((std::strtoul(fields[kFlags].c_str(), nullptr, 10) & kIsExiting) == 0) return {};
  return static_cast<int>(std::strtol(fields[kExitCode].c_str(), nullptr, 10));
}

// The same of a process that its parent has reaped; from Linux 6.15 on.
std::optional<int> status_of_reaped(int pidfd) {
  // As in linux/pidfd.h, which may be older than the kernel.
  constexpr std::uint64_t kExitInfo = 1 << 3;  // PIDFD_INFO_EXIT
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

}  // namespace

bool PeerProcess::is_stopped() const {
  if (bootstrap_address.empty() || is_pid_hidden || is_dead) return false;
  const std::vector<std::string> fields = stat_of(pid);
  return !fields.empty() && (fields[0] == "T" || fields[0] == "t");
}

std::string PeerProcess::last_words() const {
  const std::lock_guard lock(mutex_);
  return last_words_;
}

void PeerProcess::keep_last_words(std::string words) {
  // The text becomes part of error messages, which must be valid text in Python.
  for (char& letter : words)
    if (letter < ' ' || letter > '~') letter = '?';
  const std::lock_guard lock(mutex_);
  last_words_ = std::move(words);
}

void PeerProcess::end(int pidfd) {
  if (!is_pid_hidden) {
    // Its parent may reap it between the two questions, but not a second time.
    std::optional<int> status = status_of_ending(pid);
    if (!status) status = status_of_reaped(pidfd);
    if (status && WIFEXITED(*status)) has_exited = true;
  }
  is_dead = true;
}

std::string name_of_process(int rank, const PeerProcess& process, const std::string& host) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(process.pid) +
         (process.is_pid_hidden ? " of another PID namespace" : "") + " on " + host + ")";
}

std::string why_it_ended(const std::string& last_words) {
  return last_words.empty() ? "; read the end of its output" : ": " + last_words;
}

std::string AbortReason::to_text() const {
  std::ostringstream line;
  line << static_cast<int>(kind) << ' ' << origin << ' ' << culprit << '\n' << text;
  return line.str();
}

AbortReason AbortReason::from_text(const std::string& text) {
  std::istringstream stream(text);
  int kind = 0;
  AbortReason reason;
  stream >> kind >> reason.origin >> reason.culprit;
  reason.kind = static_cast<ErrorKind>(kind);
  const std::size_t line_end = text.find('\n');
  if (line_end != std::string::npos) reason.text = text.substr(line_end + 1);
  return reason;
}

}  // namespace ringcomm
