#include "host/cores.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>
#include <system_error>

#include "host/process.h"
#include "host/rank_record.h"
#include "host/workers.h"

namespace ringcomm::host {
namespace {

// As the system calls have them.
using Word = unsigned long;
constexpr std::size_t kWordBits = CHAR_BIT * sizeof(Word);
using Words = std::array<Word, Cores{}.size() / kWordBits>;

Cores cores_in(const std::string& text) {
  Cores cores;
  std::istringstream ranges(text);
  for (std::size_t begin = 0; ranges >> begin; ranges.ignore()) {
    std::size_t last = begin;
    if (ranges.peek() == '-') ranges.ignore() >> last;
    for (; begin <= last && begin < cores.size(); ++begin) cores.set(begin);
  }
  return cores;
}

std::vector<Cores> cores_in(const std::vector<std::string>& texts) {
  std::vector<Cores> sets;
  for (const std::string& text : texts) sets.push_back(cores_in(text));
  return sets;
}

// Mostly one, where no rank is pinned.
std::set<std::string> kinds_of(const std::vector<std::string>& texts) {
  return {texts.begin(), texts.end()};
}

// Whether threads of the team may have other cores than this one, which has `cores`: OpenMP pins
// them, or the program has pinned some. Elsewhere the team is not asked: that would begin threads
// that the program may never need, and libgomp ends a process that gets none.
bool may_team_have_others(const Cores& cores) {
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
    if (std::getenv(name) != nullptr) return true;
  std::error_code error;
  for (std::filesystem::directory_iterator task("/proc/self/task", error), end; task != end;
       task.increment(error))
    if ((cores_of_thread(std::stoi(task->path().filename())) & ~cores).any()) return true;
  return false;
}

struct CoreShares {
  std::mutex mutex;
  std::set<const CoreShare*> all;
  std::atomic<int> most_ranks_per_core = 1, fewest_cores_per_rank = 0;
};
constinit PerProcess<CoreShares> core_shares;

}  // namespace

Cores cores_of_thread(int thread) {
  Cores cores;
  Words words{};
  if (::sched_getaffinity(thread, sizeof(words), reinterpret_cast<cpu_set_t*>(words.data())) == 0)
    for (std::size_t word = 0; word < words.size(); ++word)
      for (Word left = words[word]; left != 0; left &= left - 1)
        cores.set(word * kWordBits + static_cast<std::size_t>(std::countr_zero(left)));
  return cores;
}

bool restrict_thread(const Cores& cores) {
  Words words{};
  if (cores.all())
    words.fill(~Word{0});
  else
    for_each_core(
        cores, [&](std::size_t core) { words[core / kWordBits] |= Word{1} << (core % kWordBits); });
  return ::sched_setaffinity(0, sizeof(words), reinterpret_cast<cpu_set_t*>(words.data())) == 0;
}

std::string usable_cores() {
  Cores cores = cores_of_thread();
  const ThreadTeam& team = thread_team();
  if (const auto size = static_cast<std::size_t>(team.size());
      size > cores.count() && may_use_team() && may_team_have_others(cores)) {
    std::mutex mutex;
    team.run(size, [&](std::size_t) {
      const std::lock_guard lock(mutex);
      cores |= cores_of_thread();
    });
  }
  std::vector<std::uint64_t> numbers;
  for_each_core(cores, [&](std::size_t core) { numbers.push_back(core); });
  return ranges_of(numbers);
}

std::vector<std::string> read_nodes(const std::string& folder) {
  std::vector<std::string> nodes;
  for (std::string line;; nodes.push_back(line)) {
    std::ifstream file(folder + "/node" + std::to_string(nodes.size()) + "/cpulist");
    if (!std::getline(file, line)) return nodes;
  }
}

std::vector<int> cores_of_node(const std::vector<int>& cores, int near,
                               const std::vector<std::string>& nodes) {
  const auto has = [](const Cores& node, int core) {
    return node.test(static_cast<std::size_t>(core) % node.size());
  };
  for (const std::string& text : nodes) {
    const Cores node = cores_in(text);
    if (!has(node, near)) continue;
    std::vector<int> found;
    std::ranges::copy_if(cores, std::back_inserter(found),
                         [&](int core) { return has(node, core); });
    return found.size() < 2 ? cores : found;
  }
  return cores;
}

// Ranks that are pinned to equal, nested or separate sets of cores are short of them exactly if too
// many ranks have only cores of one of these sets, or of the union. Cores that are not known may be
// one.
int ranks_per_core(const std::vector<std::string>& cores_of_ranks, double quota) {
  const std::vector<Cores> sets = cores_in(cores_of_ranks);
  const auto num_all = static_cast<double>(sets.size());
  if (std::ranges::any_of(sets, &Cores::none)) return static_cast<int>(sets.size());
  double most = std::max(1.0, num_all / quota);
  const auto look_at = [&](const Cores& cores) {
    const auto num_ranks =
        std::ranges::count_if(sets, [&](const Cores& set) { return (set & ~cores).none(); });
    most = std::max(most, static_cast<double>(num_ranks) / static_cast<double>(cores.count()));
  };
  Cores all;
  for (const Cores& set : sets) all |= set;
  look_at(all);
  for (const std::string& kind : kinds_of(cores_of_ranks)) look_at(cores_in(kind));
  return static_cast<int>(std::ceil(std::min(most, num_all)));
}

int cores_per_rank(const std::vector<std::string>& cores_of_ranks, double quota) {
  const std::vector<Cores> sets = cores_in(cores_of_ranks);
  double fewest = std::min<double>(Cores{}.size(), quota / static_cast<double>(sets.size()));
  for (const std::string& kind : kinds_of(cores_of_ranks)) {
    double share = 0;
    for_each_core(cores_in(kind), [&](std::size_t core) {
      share += 1.0 / static_cast<double>(std::ranges::count_if(
                         sets, [&](const Cores& other) { return other.test(core); }));
    });
    fewest = std::min(fewest, share);
  }
  return static_cast<int>(fewest + 1e-9);  // three thirds add up to a little less than one
}

CoreShare::CoreShare(int ranks_per_core, int cores_per_rank)
    : ranks_per_core_(ranks_per_core), cores_per_rank_(cores_per_rank) {
  count(true);
}

CoreShare::~CoreShare() { count(false); }

// A forked child has none of those that it inherited.
void CoreShare::count(bool exists) const {
  CoreShares& shares = core_shares.get();
  const std::lock_guard lock(shares.mutex);
  exists ? void(shares.all.insert(this)) : void(shares.all.erase(this));
  int most = 1, fewest = shares.all.empty() ? 0 : std::numeric_limits<int>::max();
  for (const CoreShare* share : shares.all) {
    most = std::max(most, share->ranks_per_core_);
    fewest = std::min(fewest, share->cores_per_rank_);
  }
  shares.most_ranks_per_core = most;
  shares.fewest_cores_per_rank = fewest;
}

int CoreShare::most_ranks_per_core() { return core_shares.get().most_ranks_per_core; }

int CoreShare::fewest_cores_per_rank() { return core_shares.get().fewest_cores_per_rank; }

}  // namespace ringcomm::host
