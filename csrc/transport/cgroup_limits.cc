#include "transport/cgroup_limits.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace ringcomm {
namespace {

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
void read_ancestors(const path& root, const path& cgroup, CgroupLimits& limits) {
  path folder = root;
  read_folder(folder, limits);
  for (const path& name : cgroup.relative_path()) read_folder(folder /= name, limits);
}

}  // namespace

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
