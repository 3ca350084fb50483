#include "host/cores.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "host/rank_record.h"
#include "host/workers.h"

namespace ringcomm::host {
namespace {

void add_cores_of_thread(std::set<std::uint64_t>& cores) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;  // too many to tell
  for (std::uint64_t core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.insert(core);
}

std::set<std::uint64_t> cores_in(const std::string& text) {
  std::set<std::uint64_t> cores;
  std::istringstream ranges(text);
  for (std::uint64_t core = 0; ranges >> core; ranges.ignore()) {
    std::uint64_t last = core;
    if (ranges.peek() == '-') ranges.ignore() >> last;
    for (; core <= last; ++core) cores.insert(core);
  }
  return cores;
}

}  // namespace

std::string usable_cores() {
  std::set<std::uint64_t> cores;
  add_cores_of_thread(cores);
  const ThreadTeam& team = thread_team();
  if (const auto size = static_cast<std::size_t>(team.size()); size > cores.size()) {
    std::mutex mutex;
    team.run(size, [&](std::size_t) {
      const std::lock_guard lock(mutex);
      add_cores_of_thread(cores);
    });
  }
  return ranges_of({cores.begin(), cores.end()});
}

int cores_per_rank(const std::vector<std::string>& cores, double quota) {
  std::map<std::uint64_t, int> num_users;
  for (const std::string& text : cores)
    for (const std::uint64_t core : cores_in(text)) ++num_users[core];
  auto fewest = static_cast<double>(num_users.size());
  for (const std::string& text : cores) {
    double share = 0;
    for (const std::uint64_t core : cores_in(text)) share += 1.0 / num_users[core];
    fewest = std::min(fewest, share);
  }
  fewest = std::min(fewest, quota / static_cast<double>(cores.size()));
  return static_cast<int>(fewest + 1e-9);  // thirds add up to a little less
}

}  // namespace ringcomm::host
