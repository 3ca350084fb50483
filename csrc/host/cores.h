#pragma once

#include <limits>
#include <string>
#include <vector>

namespace ringcomm::host {

/// The cores on which this rank's kernels may run, as text for its record: those of this thread, or
/// of all threads of its team where the program has pinned each to cores of its own.
std::string usable_cores();

/// How many cores each of some ranks has for itself: a core counts in equal parts for those that
/// may use it, and `quota`, the CPU time per time that the ranks' cgroup gives, is shared too.
/// `cores` are the ranks' texts; the smallest number of any is returned, 0 where one is unknown.
int cores_per_rank(const std::vector<std::string>& cores,
                   double quota = std::numeric_limits<double>::infinity());

}  // namespace ringcomm::host
