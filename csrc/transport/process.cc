#include "transport/process.h"

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace ringcomm {
namespace {

std::atomic<int> generation = 0;

using Body = std::function<void()>;

void* run_body(void* body) {
  const std::unique_ptr<Body> owned(static_cast<Body*>(body));
  (*owned)();
  return nullptr;
}

int create_thread(::pthread_t& thread, std::size_t stack_bytes, Body* body) {
  ::pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  if (stack_bytes > 0) ::pthread_attr_setstacksize(&attributes, stack_bytes);
  const int error = ::pthread_create(&thread, &attributes, run_body, body);
  ::pthread_attr_destroy(&attributes);
  return error;
}

using std::filesystem::path;

// What version 1 has for "no limit" of memory is the largest number of whole pages.
constexpr double kNoBytes = 1e18;

// The first number in a file, which may be followed by another; none if it is not one, as "max".
std::optional<double> number_in(const path& file, double* second = nullptr) {
  std::ifstream text(file);
  double first = 0;
  if (!(text >> first)) return std::nullopt;
  if (second != nullptr) text >> *second;
  return first;
}

void lower(std::optional<CgroupLimits::Limit>& limit, double value, const path& file) {
  if (!limit || value < limit->value) limit = CgroupLimits::Limit{value, file.string()};
}

void read_folder(const path& folder, CgroupLimits& limits) {
  double period_us = 0;
  if (const auto quota_us = number_in(folder / "cpu.max", &period_us); quota_us && period_us > 0)
    lower(limits.cpu_cores, *quota_us / period_us, folder / "cpu.max");
  if (const auto quota_us = number_in(folder / "cpu.cfs_quota_us"); quota_us && *quota_us > 0)
    if (const auto period = number_in(folder / "cpu.cfs_period_us"); period && *period > 0)
      lower(limits.cpu_cores, *quota_us / *period, folder / "cpu.cfs_quota_us");
  for (const char* name : {"memory.max", "memory.limit_in_bytes"})
    if (const auto bytes = number_in(folder / name); bytes && *bytes < kNoBytes)
      lower(limits.memory_bytes, *bytes, folder / name);
}

// A container may see its own cgroup at the root and its name on the host: folders that are not
// there are skipped.
void read_ancestors(path folder, const path& cgroup, CgroupLimits& limits) {
  read_folder(folder, limits);
  for (const path& name : cgroup.relative_path()) read_folder(folder /= name, limits);
}

}  // namespace

int process_generation() {
  // A load instead of a system call, because every collective calls it.
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  return generation.load(std::memory_order_relaxed);
}

BackgroundThread start_background_thread(const char* name, std::function<void()> body,
                                         std::size_t stack_bytes) {
  auto owned = std::make_unique<Body>(std::move(body));
  sigset_t all, previous;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &previous);  // the thread inherits it
  ::pthread_t thread{};
  int error = create_thread(thread, stack_bytes, owned.get());
  // Thread-local variables of the program's libraries are part of the stack, and may fill a small
  // one.
  if (error == EINVAL) error = create_thread(thread, kDefaultStackBytes, owned.get());
  ::pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  if (error != 0)
    throw std::system_error(error, std::generic_category(),
                            std::string("ringcomm: the thread ") + name +
                                " could not be started; check the limits of threads (ulimit -u, "
                                "pids.max of the cgroup) and of memory");
  owned.release();
  ::pthread_setname_np(thread, name);
  return BackgroundThread(thread);
}

CgroupLimits read_cgroup_limits(const std::string& proc, const std::string& cgroups) {
  CgroupLimits limits;
  read_folder(cgroups, limits);
  std::ifstream lines(path(proc) / "cgroup");
  for (std::string line; std::getline(lines, line);) {  // "number:controllers:cgroup"
    std::istringstream fields(line);
    std::string number, controllers, cgroup;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, cgroup);
    if (controllers.empty()) read_ancestors(cgroups, cgroup, limits);
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');)
      if (name == "cpu" || name == "memory") read_ancestors(path(cgroups) / name, cgroup, limits);
  }
  return limits;
}

const CgroupLimits& cgroup_limits() {
  static const CgroupLimits limits = read_cgroup_limits("/proc/self", "/sys/fs/cgroup");
  return limits;
}

}  // namespace ringcomm
