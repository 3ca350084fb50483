#include "host/process.h"

#include <pthread.h>
#include <sys/random.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/errors.h"

namespace ringcomm {
namespace {

std::atomic<int> generation = 0;

// At load: a parent may fork before it has called anything.
[[maybe_unused]] const int registered =
    ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

// Lowers the limit to the first of a file's numbers, in units of the second if there is one; a file
// with "max" has none.
void lower(std::optional<CgroupLimits::Limit>& limit, const std::filesystem::path& path) {
  std::ifstream file(path);
  double value = 0, unit = 1;
  if (!(file >> value)) return;
  file >> unit;
  if (!limit || value / unit < limit->value) limit = {value / unit, path.string()};
}

// What to do about an error of the system, where that is known.
std::string remedy_of(int code) {
  if (code == EMFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return "; raise the limit of open files, " + std::to_string(limit.rlim_cur) + " (ulimit -n)";
  }
  if (code == ENOMEM) return "; free memory, or raise the limit of address space (ulimit -v)";
  if (code == EFBIG) return "; raise the limit of file sizes (ulimit -f)";
  if (code == EBADF) return "; a library of this process has closed its descriptors";
  if (code == EPERM || code == EACCES || code == ENOSYS)
    return "; allow this call in the container's seccomp filter or sandbox (Landlock, AppArmor)";
  return "";
}

}  // namespace

// A load instead of a system call, because every collective calls it.
int process_generation() { return generation.load(std::memory_order_relaxed); }

CgroupLimits read_cgroup_limits(const std::string& proc, const std::string& cgroups) {
  std::string line;
  for (std::ifstream lines(proc + "/cgroup"); !line.starts_with("0::");)
    if (!std::getline(lines, line)) line = "0::/";
  // A container may see its own cgroup at the root and its name on the host: folders that are not
  // there have no files.
  CgroupLimits limits;
  std::filesystem::path folder = cgroups;
  for (const auto& name : std::filesystem::path(line.substr(3))) {
    if (name != "/") folder /= name;
    lower(limits.cpu_cores, folder / "cpu.max");
    lower(limits.memory_bytes, folder / "memory.max");
  }
  return limits;
}

const CgroupLimits& cgroup_limits() {
  static const CgroupLimits limits = read_cgroup_limits("/proc/self", "/sys/fs/cgroup");
  return limits;
}

bool kernel_uses_cycle_counter(const char* clocksource) {
  std::string name;
  std::getline(std::ifstream(clocksource), name);
  return name == "tsc" || name == "kvm-clock" || name == "hyperv_clocksource_tsc_page";
}

namespace host {

std::string describe_errno(const std::string& what, int code) {
  return "ringcomm: " + what + " failed: " + std::strerror(code) + " (errno " +
         std::to_string(code) + ")" + remedy_of(code);
}

void throw_errno(const std::string& what) {
  throw Error({.kind = ErrorKind::kSystem}, describe_errno(what, errno));
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (::getrandom(&number, sizeof(number), 0) != sizeof(number))
    if (errno != EINTR) throw_errno("getrandom");
  return number;
}

std::string random_text() {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx",
                static_cast<unsigned long long>(random_number()),
                static_cast<unsigned long long>(random_number()));
  return text;
}

}  // namespace host
}  // namespace ringcomm
