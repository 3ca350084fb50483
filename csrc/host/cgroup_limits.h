#pragma once

#include <optional>
#include <string>

namespace ringcomm {

/// The smallest limits of this process's cgroup and its ancestors, version 1 or 2. They hold for
/// all processes of the cgroup together.
struct CgroupLimits {
  struct Limit {
    double value;
    std::string file;  ///< that sets it
  };
  std::optional<Limit> cpu_cores;  ///< CPU time per time
  std::optional<Limit> memory_bytes;
};

/// Reads them; `proc` is the process's folder and `cgroups` where cgroups are mounted.
CgroupLimits read_cgroup_limits(const std::string& proc, const std::string& cgroups);
/// Those of this process when it first asked.
const CgroupLimits& cgroup_limits();

}  // namespace ringcomm
