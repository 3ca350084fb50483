#pragma once

#include <bitset>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace ringcomm::host {

/// Cores by their numbers. As many as Linux may have: the kernel refuses to fill a smaller set than
/// its own, and glibc's cpu_set_t ends at 1,024.
using Cores = std::bitset<8192>;

/// Calls `visit` with each core, ascending. By libstdc++'s own search: most of a set is empty.
template <class Visit>
void for_each_core(const Cores& cores, const Visit& visit) {
  for (std::size_t core = cores._Find_first(); core < cores.size(); core = cores._Find_next(core))
    visit(core);
}

/// Those that a thread may use, by default the calling one; none where the kernel does not tell.
Cores cores_of_thread(int thread = 0);
/// Restricts the calling thread to these; false where the kernel refuses.
bool restrict_thread(const Cores& cores);

/// The cores on which this rank's kernels may run, as text for its record ("0-3, 8"): those of this
/// thread, or of all threads of its team where the program has pinned each to cores of its own.
/// Empty where that is not known.
std::string usable_cores();

/// The cores of each NUMA node; empty where the kernel does not tell.
std::vector<Cores> read_nodes(const std::string& folder = "/sys/devices/system/node");
/// Of some cores those of the node that has core `near`, or all where that leaves fewer than two.
Cores cores_of_node(const Cores& cores, std::size_t near, const std::vector<Cores>& nodes);

/// How many cores each of the ranks of a host has, given by their usable_cores(), where each core
/// and `quota`, the CPU time per time of their cgroup, are shared equally by those that may use it:
/// the smallest share of any rank. 1 / N for N ranks at least, and where one's cores are not known.
double cores_per_rank(const std::vector<std::string>& cores_of_ranks,
                      double quota = std::numeric_limits<double>::infinity());

/// cores_per_rank() of a group, for as long as this process has the group. Groups of one process
/// run on the same cores, so the smallest share counts for all.
class CoreShare {
 public:
  explicit CoreShare(double cores_per_rank);
  ~CoreShare();
  CoreShare(const CoreShare&) = delete;
  CoreShare& operator=(const CoreShare&) = delete;

  /// How many ranks share a core; 1 if each has one to itself, and without a group.
  static int most_ranks_per_core();
  /// How many cores each rank has to itself; 0 without a group.
  static int fewest_cores_per_rank();

 private:
  void count(bool exists) const;

  double cores_per_rank_;
};

}  // namespace ringcomm::host
