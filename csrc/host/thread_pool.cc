#include "host/thread_pool.h"

#include <sched.h>

#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <system_error>

#include "host/process.h"
#include "host/rank_record.h"

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
  std::multiset<double> all;
  std::atomic<int> most_ranks_per_core = 1, fewest_cores_per_rank = 0;
};
constinit PerProcess<CoreShares> core_shares;

// A call below it is over before other cores have been woken.
constexpr std::size_t kMinCallBytes = std::size_t{256} << 10;

ThreadTeam team_of_program = {[] { return 1; }, nullptr};
bool has_own_threads = true;
thread_local bool is_alone = false;

int count_allowed() { return static_cast<int>(cores_of_thread().count()); }

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

std::vector<Cores> read_nodes(const std::string& folder) {
  std::vector<Cores> nodes;
  std::error_code error;  // their numbers may have gaps
  for (std::filesystem::directory_iterator node(folder, error), end; node != end;
       node.increment(error)) {
    std::ifstream file(node->path() / "cpulist");
    if (std::string line; std::getline(file, line)) nodes.push_back(cores_in(line));
  }
  return nodes;
}

Cores cores_of_node(const Cores& cores, std::size_t near, const std::vector<Cores>& nodes) {
  for (const Cores& node : nodes)
    if (node.test(near % node.size()) && (cores & node).count() >= 2) return cores & node;
  return cores;
}

double cores_per_rank(const std::vector<std::string>& cores_of_ranks, double quota) {
  std::map<std::string, int> num_ranks;  // by their cores: mostly one kind, where none is pinned
  for (const std::string& cores : cores_of_ranks) ++num_ranks[cores];
  std::vector<int> num_sharing(Cores{}.size());
  for (const auto& [text, num] : num_ranks)
    for_each_core(cores_in(text), [&, num = num](std::size_t core) { num_sharing[core] += num; });
  const auto num_all = static_cast<double>(cores_of_ranks.size());
  double fewest = std::min(static_cast<double>(Cores{}.size()), quota / num_all);
  for (const auto& [text, num] : num_ranks) {
    double share = 0;
    for_each_core(cores_in(text), [&](std::size_t core) { share += 1.0 / num_sharing[core]; });
    fewest = std::min(fewest, share);
  }
  return std::max(fewest, 1 / num_all);
}

CoreShare::CoreShare(double cores_per_rank) : cores_per_rank_(cores_per_rank) { count(true); }

CoreShare::~CoreShare() { count(false); }

// A forked child has none of those that it inherited.
void CoreShare::count(bool exists) const {
  CoreShares& shares = core_shares.get();
  const std::lock_guard lock(shares.mutex);
  exists ? void(shares.all.insert(cores_per_rank_))
         : void(shares.all.erase(shares.all.find(cores_per_rank_)));
  constexpr double kRounding = 1e-9;  // three thirds add up to a little less than one
  const double fewest = shares.all.empty() ? 0 : *shares.all.begin();
  shares.most_ranks_per_core =
      fewest == 0 ? 1 : static_cast<int>(std::ceil(1 / fewest - kRounding));
  shares.fewest_cores_per_rank = static_cast<int>(fewest + kRounding);
}

int CoreShare::most_ranks_per_core() { return core_shares.get().most_ranks_per_core; }

int CoreShare::fewest_cores_per_rank() { return core_shares.get().fewest_cores_per_rank; }

void set_thread_team(const ThreadTeam& team, bool is_inherited) {
  team_of_program = team;
  has_own_threads = !is_inherited;
}

const ThreadTeam& thread_team() { return team_of_program; }

bool may_use_team() { return has_own_threads && process_generation() == 0; }

void leave_thread_team() { is_alone = true; }

ThreadPool::ThreadPool(int max_threads)
    : num_allowed_(count_allowed()), max_threads_(max_threads) {}

void ThreadPool::begin(std::size_t num_bytes) {
  may_split_ = false;
  num_threads_ = 1;
  taken_ticks_ = moved_bytes_ = 0;
  if (num_bytes < kMinCallBytes || max_threads_ == 1 || is_alone) return;
  const int team_size = team_of_program.size();
  if (team_size < 2) return;
  // A program may pin its threads to one core each, and then makes groups; or pins itself later.
  may_split_ =
      max_threads_ > 0 || (may_use_team() && team_size <= CoreShare::fewest_cores_per_rank() &&
                           count_allowed() >= std::min(team_size, num_allowed_));
  if (!may_split_) return;
  if (max_threads_ > 0)
    num_threads_ = static_cast<std::size_t>(std::min(max_threads_, team_size));
  else if (num_alone_left_ == 0)
    num_threads_ = static_cast<std::size_t>(team_size);
  else
    --num_alone_left_;
}

void ThreadPool::end() {
  if (moved_bytes_ == 0 || max_threads_ > 0) return;
  const double rate = static_cast<double>(taken_ticks_) / static_cast<double>(moved_bytes_);
  double& alone = alone_ticks_per_byte_;
  if (num_threads_ == 1) {
    // A stop of the process in a call counts as twice the time at most, and is forgotten after a
    // call without one.
    alone = alone == 0 || rate < alone / 2 ? rate : (alone + std::min(rate, 2 * alone)) / 2;
  } else if (rate < alone) {
    num_alone_next_ = 2 * kFirstAlone;
  } else {
    num_alone_left_ = num_alone_next_;
    num_alone_next_ = std::min(2 * num_alone_next_, kMostAlone);
  }
}

}  // namespace ringcomm::host
