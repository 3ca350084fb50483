#include "host/cgroup_limits.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

namespace ringcomm {
namespace {

using std::filesystem::path;

// What version 1 has for "no limit" of memory is the largest number of whole pages.
constexpr double kNoBytes = 1e18;

// The numbers of a file from its beginning on; none where it has a word, as "max".
std::vector<double> numbers_in(const path& file) {
  std::ifstream text(file);
  return {std::istream_iterator<double>(text), {}};
}

void lower(std::optional<CgroupLimits::Limit>& limit, double value, const path& file) {
  if (!limit || value < limit->value) limit = CgroupLimits::Limit{value, file.string()};
}

void read_folder(const path& folder, CgroupLimits& limits) {
  if (const auto cpu = numbers_in(folder / "cpu.max"); cpu.size() == 2 && cpu[1] > 0)
    lower(limits.cpu_cores, cpu[0] / cpu[1], folder / "cpu.max");
  const auto quota = numbers_in(folder / "cpu.cfs_quota_us");
  const auto period = numbers_in(folder / "cpu.cfs_period_us");
  if (!quota.empty() && quota[0] > 0 && !period.empty() && period[0] > 0)
    lower(limits.cpu_cores, quota[0] / period[0], folder / "cpu.cfs_quota_us");
  for (const char* name : {"memory.max", "memory.limit_in_bytes"})
    if (const auto bytes = numbers_in(folder / name); !bytes.empty() && bytes[0] < kNoBytes)
      lower(limits.memory_bytes, bytes[0], folder / name);
}

// A container may see its own cgroup at the root and its name on the host: folders that are not
// there are skipped.
void read_ancestors(path folder, const path& cgroup, CgroupLimits& limits) {
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
